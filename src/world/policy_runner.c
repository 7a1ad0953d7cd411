/*
 * policy_runner: decides for a batch of agents.
 *
 * The engine prefills each prompt, and the policy is the softmax of the next token's logits over
 * the action tokens: nothing is generated or parsed. Only with the option `text` does the engine
 * generate text, which is parsed; a text that names no action becomes a random action.
 *
 * Decisions are sorted by adapter and prompt before they become requests, so equal decisions share
 * a request, requests with a common prefix run together and use the prefix cache, and the rows of
 * an adapter are contiguous. Cached decisions need no request. None of this changes a result,
 * because requests do not depend on each other and every decision has its own random source.
 *
 * Not here: the content of prompts, the choice of agents, the effects of actions.
 */
#include "world/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_TEXT_TOKENS = 10,
    DEFAULT_ROWS = 256,
    DEFAULT_SEQS = 64,
    DEFAULT_LEN = 256,
    SMALL_LAYER_WEIGHTS = 1 << 20, /* weights of a layer that fit into a core's private cache */
    MIN_ENGINE_SEQS = 16,          /* minimal sequences of an engine that runs on one thread */
    MIN_ENGINE_ROWS = 64,          /* minimal rows of such an engine */
    CHUNK_REQUESTS = 8,            /* requests that a thread takes from the batch at once */
};

/* Where the log-probabilities of a decision come from: the cache, or a request of the batch. */
struct decision_source {
    const float *cached; /* NULL: they come from `request` */
    int request;
};

struct policy_runner {
    const struct model *m;
    const struct environment *e;
    struct policy_runner_options o;
    struct engine_options engine_options;
    struct engine **engines; /* [n_engines]; NULL while they are freed (policy_runner_sleep) */
    int n_engines;
    int32_t action_tokens[ENV_MAX_ACTIONS];
    struct token_seq action_seqs[ENV_MAX_ACTIONS];
    struct decision_cache *cache;    /* NULL: none */
    struct engine_request *requests; /* [cap] */
    struct policy_decision **sorted; /* [cap] the decisions of a batch, sorted */
    struct decision_source *sources; /* [cap] one for each decision of the batch */
    int cap;
    struct token_ids tokens; /* token ids of all prompts, concatenated */
};

/* Sets the tokens of n choices from index `first` of action_tokens on. They must differ. */
static int choice_tokens_init(struct policy_runner *a, const char *const *names, int first, int n,
                              struct error *err) {
    for (int i = first; i < first + n; i++) {
        struct token_ids ids = {0};
        struct buf word = {0};
        buf_printf(&word, " %s", names[i - first]);
        tokenizer_encode(a->m->tok, word.data, word.len, 0, &ids);
        a->action_tokens[i] = ids.n ? ids.v[0] : -1;
        a->action_seqs[i] = (struct token_seq){&a->action_tokens[i], 1};
        token_ids_release(&ids);
        buf_release(&word);
        for (int j = first; j <= i; j++)
            if (a->action_tokens[i] < 0 || (j < i && a->action_tokens[j] == a->action_tokens[i]))
                return error_set(err, ERR_MISMATCH,
                                 "the tokenizer of '%s' begins '%s' and '%s' with one token: it "
                                 "cannot distinguish the actions",
                                 a->m->name, names[j - first], names[i - first]);
    }
    return OK;
}

static int action_tokens_init(struct policy_runner *a, struct error *err) {
    const struct environment *e = a->e;
    int rc = choice_tokens_init(a, e->actions, 0, e->n_actions, err);
    return rc == OK ? choice_tokens_init(a, e->words, e->n_actions, e->n_words, err) : rc;
}

static int choice_count(const struct policy_runner *a, const struct policy_decision *d) {
    return d->says_word ? a->e->n_words : a->e->n_actions;
}

/* Creates the engines that do not exist. */
static int wake_up(struct policy_runner *a, struct error *err) {
    for (int i = 0; i < a->n_engines; i++)
        if (!a->engines[i] && !(a->engines[i] = engine_new(a->m, &a->engine_options, err)))
            return err->code;
    return OK;
}

enum dtype policy_runner_lora_elem(const struct policy_runner *a) {
    return a->o.lora_elem;
}

void policy_runner_sleep(struct policy_runner *a) {
    for (int i = 0; i < a->n_engines; i++) {
        engine_free(a->engines[i]);
        a->engines[i] = NULL;
    }
}

static bool layers_are_small(const struct model_config *c) {
    int64_t n = 0;
    for (int p = 0; p < N_PROJ; p++)
        n += (int64_t)proj_in(c, (enum proj)p) * proj_out(c, (enum proj)p);
    return n <= SMALL_LAYER_WEIGHTS;
}

/*
 * Plans one engine per thread, each with its share of the sizes in the options, if the model is
 * small, each engine gets enough sequences, and the options do not set the number of KV pages;
 * otherwise one engine that uses all threads. The threads of one engine synchronise many times per
 * layer, and each time the activations of a small model move between the caches of the cores,
 * because matrix products are divided by output columns and the operations between them by rows.
 * Each engine reads all weights, so a large model, whose weights come from memory, has one engine.
 */
static void engines_plan(struct policy_runner *a) {
    struct engine_options *o = &a->engine_options;
    int n = pool_size(o->pool);
    if (o->n_pages || o->max_seqs / n < MIN_ENGINE_SEQS || !layers_are_small(&a->m->config)) n = 1;
    a->n_engines = n;
    a->engines = xcalloc((size_t)a->n_engines, sizeof(struct engine *));
    if (n == 1) return;
    o->max_rows = MAX(o->max_rows / n, MIN_ENGINE_ROWS);
    o->max_seqs /= n;
    o->pool = NULL;
}

/* Under a memory limit the engines get half of the room, the rest is for learning. */
static int engines_limit(struct policy_runner *a, struct error *err) {
    if (!memory_limit_get()) return OK;
    size_t n = (size_t)a->n_engines, bytes = engine_least_bytes(&a->m->config, &a->engine_options);
    const struct memory_step need = {.what = "a simulation", .least = n * bytes + WORK_BYTES};
    int rc = memory_check(a->m, &need, err);
    if (rc != OK) return rc;
    size_t half = (memory_room(a->m) - WORK_BYTES) / 2;
    engine_options_fit(&a->m->config, &a->engine_options, MAX(bytes, half / n));
    return OK;
}

struct policy_runner *policy_runner_new(const struct model *m, const struct environment *e,
                                        const struct policy_runner_options *o, struct error *err) {
    CHECK(e->n_actions > 0 && e->n_words >= 0 && e->n_actions + e->n_words <= ENV_MAX_ACTIONS);
    struct policy_runner *a = xcalloc(1, sizeof *a);
    a->m = m;
    a->e = e;
    a->o = *o;
    a->engine_options =
        (struct engine_options){.max_rows = o->max_rows ? o->max_rows : DEFAULT_ROWS,
                                .max_seqs = o->max_seqs ? o->max_seqs : DEFAULT_SEQS,
                                .max_len = o->max_len ? o->max_len : DEFAULT_LEN,
                                .max_cached = 1,
                                .n_pages = o->n_pages,
                                .kv_elem = o->kv_elem,
                                .lora_elem = o->lora_elem,
                                .pool = o->pool};
    a->engine_options.max_len = MIN(a->engine_options.max_len, m->config.max_seq_len);
    engines_plan(a);
    int rc = m->tok ? OK : error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->name);
    if (rc == OK && !o->text) rc = action_tokens_init(a, err);
    if (rc == OK) rc = engines_limit(a, err);
    if (rc == OK) rc = wake_up(a, err);
    if (o->cached_decisions > 0 && !o->text)
        a->cache = decision_cache_new(o->cached_decisions, MAX(e->n_actions, e->n_words));
    if (rc == OK) return a;
    policy_runner_free(a);
    return NULL;
}

void policy_runner_free(struct policy_runner *a) {
    if (!a) return;
    policy_runner_sleep(a);
    free(a->engines);
    token_ids_release(&a->tokens);
    decision_cache_free(a->cache);
    free(a->requests);
    free(a->sorted);
    free(a->sources);
    free(a);
}

const int32_t *policy_runner_action_tokens(const struct policy_runner *a) {
    return a->action_tokens;
}

void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *decisions, int n,
                            const struct buf *text) {
    int32_t *token_begin = xcalloc((size_t)n + 1, sizeof *token_begin);
    a->tokens.n = 0;
    for (int i = 0; i < n; i++) {
        tokenizer_encode(a->m->tok, text->data + decisions[i].text_offset, decisions[i].text_len,
                         TOKENIZER_ADD_BOS, &a->tokens);
        token_begin[i + 1] = a->tokens.n;
    }
    // not in the loop above, because adding tokens may reallocate the list
    for (int i = 0; i < n; i++) {
        decisions[i].tokens = a->tokens.v + token_begin[i];
        decisions[i].n = token_begin[i + 1] - token_begin[i];
    }
    free(token_begin);
}

static void request_init(struct policy_runner *a, struct engine_request *r,
                         struct policy_decision *d) {
    *r = (struct engine_request){.prompt = d->tokens,
                                 .n_prompt = d->n,
                                 .adapter = d->n_mix ? NULL : d->adapter,
                                 .mix = d->n_mix ? d->mix : NULL,
                                 .n_mix = d->n_mix};
    if (a->o.text) {
        r->sampling = (struct sampling_params){.temperature = (float)a->o.temperature, .top_p = 1};
        r->sampling.seed = rng_u64(&d->rng);
        r->max_tokens = MAX_TEXT_TOKENS;
        return;
    }
    r->choices = a->action_seqs + (d->says_word ? a->e->n_actions : 0);
    r->n_choices = choice_count(a, d);
    // not in the exact class, so that recorded traces can be reproduced
    r->choices_only = a->m->cls == NUMERIC_FAST;
    r->logprob_temperature = (float)a->o.temperature;
}

/* Samples an action. The engine's log-probabilities are normalised over the vocabulary or the
 * choices; this function normalises them over the actions. */
static void action_sample(const struct policy_runner *a, const float *logprob,
                          struct policy_decision *d) {
    int n = choice_count(a, d);
    double max = -INFINITY, sum = 0, remaining = (double)rng_uniform(&d->rng);
    for (int i = 0; i < n; i++) max = fmax(max, (double)logprob[i]);
    for (int i = 0; i < n; i++) sum += math_exp((double)logprob[i] - max);
    double norm = max + math_log(sum);
    d->action = -1;
    for (int i = 0; i < n; i++) {
        d->logp[i] = (double)logprob[i] - norm;
        double p = math_exp(d->logp[i]);
        if (d->action < 0 && remaining < p) d->action = i;
        remaining -= p;
    }
    // rounding errors may leave a rest: take the most probable action
    for (int i = 0; d->action < 0 && i < n; i++)
        if ((double)logprob[i] >= max) d->action = i;
    if (d->action < 0) d->action = 0; // all log-probabilities are NaN
}

static void action_from_text(const struct policy_runner *a, const struct engine_request *r,
                             struct policy_decision *d) {
    struct buf b = {0};
    tokenizer_decode(a->m->tok, r->out, r->n_out, false, &b);
    d->action = a->e->parse(a->e->ctx, b.data ? b.data : "");
    if (d->action < 0) d->action = (int)rng_below(&d->rng, (uint32_t)a->e->n_actions);
    memset(d->logp, 0, sizeof d->logp);
    buf_release(&b);
}

static int tokens_compare(const struct policy_decision *a, const struct policy_decision *b) {
    for (int32_t i = 0; i < a->n && i < b->n; i++)
        if (a->tokens[i] != b->tokens[i]) return a->tokens[i] < b->tokens[i] ? -1 : 1;
    return (a->n > b->n) - (a->n < b->n);
}

static int adapters_compare(const struct adapter *a, const struct adapter *b) {
    if (a == b) return 0;
    return strcmp(a ? a->hash : "", b ? b->hash : "");
}

/* Orders by adapter, then by prompt, then by the position in the batch. */
static int decisions_compare(const void *pa, const void *pb) {
    const struct policy_decision *a = *(const struct policy_decision *const *)pa,
                                 *b = *(const struct policy_decision *const *)pb;
    int order = adapters_compare(a->adapter, b->adapter);
    if (order == 0) order = tokens_compare(a, b);
    return order ? order : (a > b) - (a < b);
}

/* Whether both decisions have the same adapter and prompt, and thus the same log-probabilities. */
static bool decisions_equal(const struct policy_decision *a, const struct policy_decision *b) {
    return a->n_mix == 0 && b->n_mix == 0 && adapters_compare(a->adapter, b->adapter) == 0 &&
           tokens_compare(a, b) == 0;
}

static struct token_seq decision_prompt(const struct policy_decision *d) {
    return (struct token_seq){d->tokens, d->n};
}

/* Builds the requests of a batch and sets the source of each decision; returns the number of
 * requests. */
static int requests_build(struct policy_runner *a, struct policy_decision *decisions, int n) {
    int n_requests = 0;
    for (int i = 0; i < n; i++) a->sorted[i] = &decisions[i];
    qsort(a->sorted, (size_t)n, sizeof(struct policy_decision *), decisions_compare);
    for (int i = 0; i < n; i++) {
        struct policy_decision *d = a->sorted[i];
        struct decision_source *s = &a->sources[d - decisions];
        if (i > 0 && !a->o.text && decisions_equal(a->sorted[i - 1], d)) {
            *s = a->sources[a->sorted[i - 1] - decisions];
            continue;
        }
        *s = (struct decision_source){0};
        if (a->cache && d->n_mix == 0)
            s->cached = decision_cache_find(a->cache, d->adapter, decision_prompt(d));
        if (s->cached) continue;
        s->request = n_requests++;
        request_init(a, &a->requests[s->request], d);
    }
    return n_requests;
}

static void batch_reserve(struct policy_runner *a, int n) {
    if (n <= a->cap) return;
    a->cap = n;
    a->requests = xrealloc(a->requests, (size_t)n * sizeof *a->requests);
    a->sorted = xrealloc(a->sorted, (size_t)n * sizeof(struct policy_decision *));
    a->sources = xrealloc(a->sources, (size_t)n * sizeof *a->sources);
}

static void decision_complete(const struct policy_runner *a, const struct decision_source *s,
                              struct policy_decision *d) {
    const struct engine_request *r = &a->requests[s->request];
    if (a->o.text)
        action_from_text(a, r, d);
    else
        action_sample(a, s->cached ? s->cached : r->choice_logprob, d);
}

static void cache_add(struct policy_runner *a, const struct engine_request *r) {
    if (a->cache && r->n_mix == 0)
        decision_cache_put(a->cache, r->adapter, (struct token_seq){r->prompt, r->n_prompt},
                           r->choice_logprob, r->n_choices);
}

struct batch {
    struct policy_runner *a;
    struct error *errors; /* [n_engines] */
};

/* Runs a chunk of the requests on the thread's engine. */
static void chunk_run(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct batch *b = ctx;
    struct error *err = &b->errors[thread];
    if (err->code == OK)
        engine_run(b->a->engines[thread], b->a->requests + begin, (int)(end - begin), NULL, err);
}

static int requests_run(struct policy_runner *a, int n, struct error *err) {
    if (a->n_engines == 1) return engine_run(a->engines[0], a->requests, n, NULL, err);
    struct batch b = {a, xcalloc((size_t)a->n_engines, sizeof *b.errors)};
    int rc = OK;
    pool_run(a->o.pool, chunk_run, &b, n, CHUNK_REQUESTS);
    for (int i = 0; rc == OK && i < a->n_engines; i++)
        if ((rc = b.errors[i].code) != OK) *err = b.errors[i];
    free(b.errors);
    return rc;
}

int policy_runner_act(struct policy_runner *a, struct policy_decision *decisions, int n,
                      const struct buf *text, struct error *err) {
    if (wake_up(a, err) != OK) return err->code;
    batch_reserve(a, n);
    policy_runner_tokenize(a, decisions, n, text);
    int n_requests = requests_build(a, decisions, n);
    int rc = requests_run(a, n_requests, err);
    for (int i = 0; rc == OK && i < n; i++) decision_complete(a, &a->sources[i], &decisions[i]);
    // at the end, because an addition may replace a cached decision that is in use
    for (int i = 0; i < n_requests; i++) {
        if (rc == OK) cache_add(a, &a->requests[i]);
        engine_request_release(&a->requests[i]);
    }
    return rc;
}
