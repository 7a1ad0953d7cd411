/*
 * policy_runner: decides for a batch of agents.
 *
 * The engine prefills each prompt, and the policy is the softmax over the actions of their
 * log-probabilities, divided by the temperature: nothing is generated or parsed. An action's
 * log-probability is the sum over its tokens, up to the first token that distinguishes it from the
 * other actions. Only with the option `text` does the engine generate text, which is parsed; a text
 * that names no action becomes a random action.
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
    /* The choices: the actions, then the words to say. All choices of a kind begin with the same
     * n_common tokens, which the requests have in their prompts; `scored` are the other ones. */
    struct token_ids choice_tokens; /* all choices, concatenated */
    struct token_seq choices[ENV_MAX_ACTIONS], scored[ENV_MAX_ACTIONS];
    int32_t n_common[2];  /* its value for actions and for words */
    bool is_one_token[2]; /* every `scored` of this kind is one token */
    int32_t longest_scored;
    int32_t first_scored[ENV_MAX_ACTIONS]; /* the first token of each `scored` */
    struct decision_cache *cache;          /* NULL: none */
    struct engine_request *requests;       /* [cap] */
    struct policy_decision **sorted;       /* [cap] the decisions of a batch, sorted */
    struct decision_source *sources;       /* [cap] one for each decision of the batch */
    int cap;
    struct token_ids tokens; /* token ids of all prompts, concatenated */
};

/* The number of tokens with which both choices begin. */
static int32_t common_prefix(const struct token_seq *a, const struct token_seq *b) {
    int32_t n = 0;
    while (n < a->n && n < b->n && a->v[n] == b->v[n]) n++;
    return n;
}

/* Encodes n choices, each as the continuation of a prompt, and appends them to choice_tokens. The
 * line break after a name distinguishes it from longer names that begin with it. */
static void choices_encode(struct policy_runner *a, const char *const *names, int first, int n,
                           int32_t *begin) {
    struct token_ids prompt = {0};
    for (int i = 0; i < n; i++) {
        char *word = xasprintf(" %s", names[i]);
        begin[first + i] = a->choice_tokens.n;
        eval_encode_pair(a->m->tok, ":", word, &prompt, &a->choice_tokens);
        eval_encode_pair(a->m->tok, ":", "\n", &prompt, &a->choice_tokens);
        begin[first + i + 1] = a->choice_tokens.n;
        free(word);
    }
    token_ids_release(&prompt);
}

/* Cuts n choices after the first token that distinguishes each one from the others, and divides
 * them into their common prefix and the rest. */
static int choices_split(struct policy_runner *a, const char *const *names, int first, int n,
                         struct error *err) {
    bool words = first > 0;
    struct token_seq *v = a->choices + first;
    int32_t length[ENV_MAX_ACTIONS], common = n > 1 ? INT32_MAX : 0;
    for (int i = 0; i < n; i++) {
        length[i] = 1;
        for (int j = 0; j < n; j++) {
            int32_t shared = j == i ? 0 : common_prefix(&v[i], &v[j]);
            if (shared == v[i].n)
                return error_set(err, ERR_MISMATCH,
                                 "the tokenizer of '%s' cannot distinguish the actions '%s' and "
                                 "'%s': rename one of them",
                                 a->m->name, names[i], names[j]);
            length[i] = MAX(length[i], shared + 1);
            if (j != i) common = MIN(common, shared);
        }
    }
    a->n_common[words] = common;
    a->is_one_token[words] = true;
    for (int i = 0; i < n; i++) {
        v[i].n = length[i];
        a->scored[first + i] = (struct token_seq){v[i].v + common, length[i] - common};
        a->first_scored[first + i] = v[i].v[common];
        a->is_one_token[words] &= length[i] - common == 1;
        a->longest_scored = MAX(a->longest_scored, length[i] - common);
    }
    return OK;
}

static int choices_init(struct policy_runner *a, struct error *err) {
    const struct environment *e = a->e;
    int32_t begin[ENV_MAX_ACTIONS + 1] = {0};
    choices_encode(a, e->actions, 0, e->n_actions, begin);
    choices_encode(a, e->words, e->n_actions, e->n_words, begin);
    for (int i = 0; i < e->n_actions + e->n_words; i++)
        a->choices[i] = (struct token_seq){a->choice_tokens.v + begin[i], begin[i + 1] - begin[i]};
    int rc = choices_split(a, e->actions, 0, e->n_actions, err);
    return rc == OK ? choices_split(a, e->words, e->n_actions, e->n_words, err) : rc;
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
int policy_runner_engines(const struct model_config *c, const struct policy_runner_options *r,
                          struct engine_options *o) {
    *o = (struct engine_options){.max_rows = r->max_rows ? r->max_rows : DEFAULT_ROWS,
                                 .max_seqs = r->max_seqs ? r->max_seqs : DEFAULT_SEQS,
                                 .max_len = r->max_len ? r->max_len : DEFAULT_LEN,
                                 .max_cached = 1,
                                 .n_pages = r->n_pages,
                                 .kv_elem = r->kv_elem,
                                 .lora_elem = r->lora_elem,
                                 .pool = r->pool};
    o->max_len = MIN(o->max_len, c->max_seq_len);
    int n = pool_size(o->pool);
    if (o->n_pages || o->max_seqs / n < MIN_ENGINE_SEQS || !layers_are_small(c)) return 1;
    if (n == 1) return 1;
    o->max_rows = MAX(o->max_rows / n, MIN_ENGINE_ROWS);
    o->max_seqs /= n;
    o->pool = NULL;
    return n;
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
    a->n_engines = policy_runner_engines(&m->config, o, &a->engine_options);
    a->engines = xcalloc((size_t)a->n_engines, sizeof(struct engine *));
    int rc = m->tok ? OK : error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->name);
    if (rc == OK && !o->text) rc = choices_init(a, err);
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
    token_ids_release(&a->choice_tokens);
    decision_cache_free(a->cache);
    free(a->requests);
    free(a->sorted);
    free(a->sources);
    free(a);
}

const struct token_seq *policy_runner_choices(const struct policy_runner *a) {
    return a->choices;
}

int32_t policy_runner_common_tokens(const struct policy_runner *a, bool words) {
    return a->n_common[words];
}

const int32_t *policy_runner_choice_tokens(const struct policy_runner *a) {
    return a->is_one_token[0] && (a->e->n_words == 0 || a->is_one_token[1]) ? a->first_scored
                                                                            : NULL;
}

void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *decisions, int n,
                            const struct buf *text) {
    int32_t *token_begin = xcalloc((size_t)n + 1, sizeof *token_begin);
    a->tokens.n = 0;
    for (int i = 0; i < n; i++) {
        tokenizer_encode(a->m->tok, text->data + decisions[i].text_offset, decisions[i].text_len,
                         TOKENIZER_ADD_BOS, &a->tokens);
        decisions[i].n = a->tokens.n - token_begin[i];
        // the request's prompt also has the tokens with which all choices begin
        const struct token_seq *choice = &a->choices[decisions[i].says_word ? a->e->n_actions : 0];
        for (int k = 0; k < a->n_common[decisions[i].says_word]; k++)
            token_ids_add(&a->tokens, choice->v[k]);
        token_begin[i + 1] = a->tokens.n;
    }
    // not in the loop above, because adding tokens may reallocate the list
    for (int i = 0; i < n; i++) decisions[i].tokens = a->tokens.v + token_begin[i];
    free(token_begin);
}

/* The tokens of a decision's request: its prompt and the tokens with which all choices begin. */
static struct token_seq request_prompt(const struct policy_runner *a,
                                       const struct policy_decision *d) {
    return (struct token_seq){d->tokens, d->n + a->n_common[d->says_word]};
}

static void request_init(struct policy_runner *a, struct engine_request *r,
                         struct policy_decision *d) {
    struct token_seq prompt = request_prompt(a, d);
    *r = (struct engine_request){.prompt = prompt.v,
                                 .n_prompt = prompt.n,
                                 .adapter = d->n_mix ? NULL : d->adapter,
                                 .mix = d->n_mix ? d->mix : NULL,
                                 .n_mix = d->n_mix};
    if (a->o.text) {
        r->sampling = (struct sampling_params){.temperature = (float)a->o.temperature, .top_p = 1};
        r->sampling.seed = rng_u64(&d->rng);
        r->max_tokens = POLICY_TEXT_TOKENS;
        return;
    }
    r->choices = a->scored + (d->says_word ? a->e->n_actions : 0);
    r->n_choices = choice_count(a, d);
    if (!a->is_one_token[d->says_word]) return;
    // not in the exact class, so that recorded traces can be reproduced
    r->choices_only = a->m->cls == NUMERIC_FAST;
    r->logprob_temperature = (float)a->o.temperature;
}

/* Samples an action. The engine's log-probabilities are normalised over the vocabulary or the
 * choices; this function normalises them over the actions. The temperature of a sum over several
 * tokens divides the sum: to the engine its logits have temperature 1. */
static void action_sample(const struct policy_runner *a, const float *logprob,
                          struct policy_decision *d) {
    int n = choice_count(a, d);
    double divisor = a->is_one_token[d->says_word] ? 1 : a->o.temperature;
    double max = -INFINITY, sum = 0, remaining = (double)rng_uniform(&d->rng);
    for (int i = 0; i < n; i++) d->logp[i] = (double)logprob[i] / divisor;
    for (int i = 0; i < n; i++) max = fmax(max, d->logp[i]);
    for (int i = 0; i < n; i++) sum += math_exp(d->logp[i] - max);
    double norm = max + math_log(sum);
    d->action = -1;
    for (int i = 0; i < n; i++) {
        d->logp[i] -= norm;
        double p = math_exp(d->logp[i]);
        if (d->action < 0 && remaining < p) d->action = i;
        remaining -= p;
    }
    // rounding errors may leave a rest: take the most probable action
    for (int i = 0; d->action < 0 && i < n; i++)
        if ((double)logprob[i] / divisor >= max) d->action = i;
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
            s->cached = decision_cache_find(a->cache, d->adapter, request_prompt(a, d));
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

/* If a request of the batch is longer than the engines allow, creates engines with twice the length
 * or more, but the same KV cache unless one request needs more. */
static int engines_lengthen(struct policy_runner *a, const struct policy_decision *decisions, int n,
                            struct error *err) {
    struct engine_options *o = &a->engine_options;
    int32_t longest = 0, limit = a->m->config.max_seq_len,
            reply = a->o.text ? POLICY_TEXT_TOKENS : a->longest_scored;
    for (int i = 0; i < n; i++) longest = MAX(longest, request_prompt(a, &decisions[i]).n);
    if (longest + reply <= o->max_len) return OK;
    if (a->o.fixed_len)
        return error_set(err, ERR_USAGE,
                         "a prompt has %d tokens, with its reply more than the %d of the context; "
                         "raise --max-model-len to %d",
                         longest, o->max_len, longest + reply);
    if (o->max_len == limit) return OK; // the engine refuses it
    policy_runner_sleep(a);
    if (!o->n_pages) o->n_pages = o->max_seqs * kv_cache_pages_for(o->max_len);
    o->max_len = MIN(limit, MAX(2 * o->max_len, longest + reply));
    o->n_pages = MAX(o->n_pages, kv_cache_pages_for(o->max_len));
    return engines_limit(a, err);
}

int policy_runner_act(struct policy_runner *a, struct policy_decision *decisions, int n,
                      const struct buf *text, struct error *err) {
    policy_runner_tokenize(a, decisions, n, text);
    if (engines_lengthen(a, decisions, n, err) != OK || wake_up(a, err) != OK) return err->code;
    batch_reserve(a, n);
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
