/*
 * engine_client: the llm_client on an engine. It converts calls to requests, computes the requests'
 * keys, reads known results from the store, runs the other requests in one multi-LoRA batch and
 * stores their results in one transaction.
 *
 * A judge's call needs two requests: one chooses the answer among the candidates with exact
 * probabilities; the other generates a rationale for this answer under a grammar. The answer is not
 * parsed from text, so it cannot be malformed.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include "grammar/grammar.h"

#include <stdlib.h>
#include <string.h>
#include <unistr.h>

enum { CALLS_PER_BATCH = 4096, LOOP_TOKENS = 16 };
#define JUDGE_PREFIX "{\"answer\": \""
#define NO_ROOM "the call has no room in the context"

/* One request of a call. */
struct pending_llm_call {
    struct llm_call *call;
    struct choice_prompt prompt;
    struct engine_request req;
    char key[HASH_LEN]; /* request key, by which the store finds the result */
    bool cached;        /* the store had the result */
};
/* The requests of one engine batch: either texts and answers, or the rationales of judges. */
struct call_batch {
    struct engine_client *client;
    const char *model; /* hash of the model */
    struct pending_llm_call *v;
    int n;
    struct grammar *rationale; /* NULL until it is needed */
};

/* The JSON encoding of a string without its quotes. malloc'ed. */
static char *json_escape(const char *text) {
    json_t *v = json_string(text);
    char *quoted = json_dumps(v, JSON_ENCODE_ANY);
    json_decref(v);
    quoted[strlen(quoted) - 1] = 0;
    memmove(quoted, quoted + 1, strlen(quoted));
    return quoted;
}

static void ids_add_text(struct token_ids *out, const struct tokenizer *tok, const char *text) {
    tokenizer_encode(tok, text, strlen(text), 0, out);
}

/* A judge's chat with the prefix of its reply, and the candidates as continuations. */
static int judge_init(struct choice_prompt *a, const struct tokenizer *tok,
                      const struct llm_call *c, struct error *err) {
    *a = (struct choice_prompt){.n_choices = c->n_candidates};
    if (chat_encode(tok, c->messages, c->n_messages, true, &a->prompt, NULL, err) != OK)
        return err->code;
    ids_add_text(&a->prompt, tok, JUDGE_PREFIX);
    for (int i = 0; i < c->n_candidates; i++) {
        char *escaped = json_escape(c->candidates[i]), *text = xasprintf("%s\"", escaped);
        choice_prompt_add_choice(a, i, tok, text, -1);
        free(text);
        free(escaped);
    }
    return OK;
}

/* A judge's chat with its reply up to the beginning of the rationale. */
static int rationale_init(struct choice_prompt *a, const struct tokenizer *tok,
                          const struct llm_call *c, struct error *err) {
    *a = (struct choice_prompt){0};
    if (chat_encode(tok, c->messages, c->n_messages, true, &a->prompt, NULL, err) != OK)
        return err->code;
    char *escaped = json_escape(c->candidates[c->answer.choice]),
         *text = xasprintf(JUDGE_PREFIX "%s\", \"rationale\": \"", escaped);
    ids_add_text(&a->prompt, tok, text);
    free(text);
    free(escaped);
    return OK;
}

static int text_init(struct choice_prompt *a, const struct tokenizer *tok, const struct llm_call *c,
                     struct error *err) {
    *a = (struct choice_prompt){0};
    if (chat_encode(tok, c->messages, c->n_messages, true, &a->prompt, NULL, err) != OK)
        return err->code;
    if (c->item && c->item->free_answer)
        ids_add_text(&a->prompt, tok, c->chain_of_thought ? WORK_PREFIX : ANSWER_PREFIX);
    int32_t end = tokenizer_eot(tok);
    if (end >= 0) a->stop[a->n_stop++] = end;
    return OK;
}

/* Whether the request generates free text without a grammar. The result of other requests does not
 * record tokens. */
static bool is_free_text(const struct pending_llm_call *p) {
    return p->req.n_choices == 0 && !p->req.grammar;
}

static bool is_multiple_choice(const struct llm_call *c) {
    return c->reply == REPLY_ANSWER && c->item->n_choices > 0;
}

static int pending_prompt_init(struct call_batch *b, struct pending_llm_call *p, bool rationale,
                               struct error *err) {
    const struct llm_call *c = p->call;
    const struct tokenizer *tok = b->client->model->tok;
    if (rationale) return rationale_init(&p->prompt, tok, c, err);
    if (c->reply == REPLY_JUDGE) return judge_init(&p->prompt, tok, c, err);
    if (!is_multiple_choice(c)) return text_init(&p->prompt, tok, c, err);
    return choice_prompt_init(&p->prompt, tok, c->messages, c->n_messages, c->item,
                              c->chain_of_thought, err);
}

/* Whether the request fits in the engine's context. */
static bool has_room(const struct call_batch *b, const struct engine_request *r) {
    int64_t longest = 0;
    for (int32_t i = 0; i < r->n_choices; i++) longest = MAX(longest, r->choices[i].n);
    return (int64_t)r->n_prompt + r->max_tokens + r->suffix.n + longest <=
           engine_max_len(b->client->engine);
}

static int pending_prepare(struct call_batch *b, struct pending_llm_call *p, bool rationale,
                           struct error *err) {
    struct llm_call *c = p->call;
    int rc = pending_prompt_init(b, p, rationale, err);
    if (rc) return rc;
    bool free_text = rationale || (c->reply != REPLY_JUDGE && !is_multiple_choice(c));
    choice_prompt_request(&p->prompt, c->mix ? NULL : c->agent->adapter, c->max_tokens, &p->req);
    p->req.mix = c->mix ? c->mix : c->agent->mix;
    p->req.n_mix = c->mix ? c->n_mix : c->agent->n_mix;
    if (c->mix && c->n_mix == 1 && c->mix[0].weight == 1) { // the request of the adapter's agent
        p->req.adapter = c->mix[0].adapter;
        p->req.n_mix = 0;
    }
    if (free_text) p->req.max_tokens = c->max_tokens;
    if (free_text) p->req.loop_tokens = LOOP_TOKENS;
    if (free_text) p->req.grammar = rationale ? b->rationale : c->grammar;
    p->req.sampling.temperature = c->temperature;
    p->req.sampling.top_p = c->temperature > 0 ? c->top_p : 1;
    /* a greedy call does not depend on the seed, so the seed is not part of its key */
    p->req.sampling.seed = c->temperature > 0 ? c->seed : 0;
    if (!has_room(b, &p->req)) c->failed = NO_ROOM;
    const struct engine *e = b->client->engine;
    record_key(&p->req, b->model, b->client->model->cls, engine_kv_elem(e), engine_lora_elem(e),
               p->key);
    return OK;
}

static void call_set_text(struct llm_call *c, const char *text) {
    free(c->text);
    c->text = xstrdup(text ? text : "");
}

static void *array32_copy(const void *v, int32_t n) {
    return n ? memcpy(xmalloc((size_t)n * 4), v, (size_t)n * 4) : NULL;
}

/* Sets the call's results from a stored or computed result. It adds to the call's costs, because a
 * judge's call has two requests. */
static void result_apply(const struct store_call *s, struct pending_llm_call *p) {
    struct llm_call *c = p->call;
    for (int i = 0; i < MIN(s->n_choices, EVAL_MAX_CHOICES); i++) c->answer.prob[i] = s->prob[i];
    if (p->req.n_choices) {
        c->answer.choice = s->choice;
        c->answer.confidence = s->prob[s->choice];
    }
    if (s->text || is_free_text(p)) call_set_text(c, s->text); // an empty reply has no text
    if (s->n_tokens) {
        c->n_tokens = s->n_tokens;
        c->ends = array32_copy(s->ends, s->n_tokens);
        c->logprobs = array32_copy(s->logprobs, s->n_tokens);
    }
    c->n_prefilled += s->n_prefilled;
    c->n_generated += s->n_generated;
    c->truncated |= s->finish;
}

/* Appends the sanitized bytes of `raw` to `text`. Changes ends[n], the offsets at which the tokens
 * end, from offsets in `raw` to offsets in `text`. */
static void sanitized_add(const struct buf *raw, int32_t *ends, int n, struct buf *text) {
    const uint8_t *v = (const uint8_t *)raw->data;
    int k = 0;
    for (size_t pos = 0; pos < raw->len;) {
        ucs4_t c;
        int len = u8_mbtoucr(&c, v + pos, raw->len - pos);
        size_t text_begin = text->len, next = pos + (size_t)MAX(len, 1);
        buf_add_sanitized(text, raw->data + pos, next - pos);
        for (; k < n && (size_t)ends[k] <= next; k++)
            ends[k] =
                (int32_t)((size_t)ends[k] == next ? text->len : text_begin + (size_t)ends[k] - pos);
        pos = next;
    }
    for (; k < n; k++) ends[k] = (int32_t)text->len;
}

/* The result of a computed request in the form that the store keeps. `text` holds its text. The
 * arrays are borrowed from the request, except `ends`, which the caller frees. */
static struct store_call store_call_of(const struct call_batch *b, const struct pending_llm_call *p,
                                       struct buf *text) {
    const struct engine_request *r = &p->req;
    bool cut = r->max_tokens > 0 && (r->n_out == r->max_tokens || r->finish == FINISH_LOOP);
    struct store_call s = {.choice = r->n_choices ? r->choice : -1,
                           .n_choices = r->n_choices,
                           .prob = r->choice_prob,
                           .n_prefilled = r->n_prefilled,
                           .n_generated = r->n_generated,
                           .finish = cut,
                           .ends = xcalloc((size_t)MAX(r->n_out, 1), sizeof *s.ends),
                           .logprobs = r->out_logprob};
    memcpy(s.key, p->key, HASH_LEN);
    struct buf raw = {0};
    tokenizer_decode_offsets(b->client->model->tok, r->out, r->n_out, false, &raw, s.ends);
    sanitized_add(&raw, s.ends, r->n_out, text); // it may be in later prompts
    buf_release(&raw);
    s.text = text->data;
    if (is_free_text(p)) s.n_tokens = r->n_out;
    return s;
}

static bool is_cache_miss(const struct pending_llm_call *p) {
    return !p->cached && !p->call->failed;
}

/* Runs all requests that are not cached as one array. */
static int run_cache_misses(struct call_batch *b, struct error *err) {
    struct engine_request *reqs = xcalloc((size_t)MAX(b->n, 1), sizeof *reqs);
    int m = 0, rc = OK;
    for (int i = 0; i < b->n; i++)
        if (is_cache_miss(&b->v[i])) reqs[m++] = b->v[i].req;
    if (m > 0)
        rc = b->client->run ? b->client->run(b->client->run_ctx, reqs, m, err)
                            : engine_run(b->client->engine, reqs, m, NULL, err);
    for (int i = 0, j = 0; i < b->n; i++)
        if (is_cache_miss(&b->v[i])) b->v[i].req = reqs[j++];
    b->client->n_computed += m;
    free(reqs);
    return rc;
}

/* Applies the computed results to their calls and stores them in one transaction. */
static int results_store(struct call_batch *b, struct error *err) {
    struct store *store = b->client->store;
    int rc = store ? store_begin(store, err) : OK;
    for (int i = 0; rc == OK && i < b->n; i++) {
        struct buf text = {0};
        if (!is_cache_miss(&b->v[i])) continue;
        struct store_call s = store_call_of(b, &b->v[i], &text);
        result_apply(&s, &b->v[i]);
        if (store) rc = store_call_put(store, &s, err);
        buf_release(&text);
        free(s.ends);
    }
    if (rc == OK && store) rc = store_commit(store, err);
    if (rc != OK && store) store_rollback(store);
    return rc;
}

/* Whether a stored result fits the request. An older store may hold a text without its tokens; the
 * call is then computed again. */
static bool stored_result_fits(const struct store_call *c, const struct pending_llm_call *p) {
    size_t len = c->text ? strlen(c->text) : 0;
    for (int i = 0; i < c->n_tokens; i++) {
        int32_t before = i ? c->ends[i - 1] : 0;
        if (c->ends[i] < before || (size_t)c->ends[i] > len) return false;
    }
    if (c->n_choices != p->req.n_choices || c->choice >= MAX(c->n_choices, 1)) return false;
    return c->n_choices ? c->choice >= 0 : !is_free_text(p) || c->n_tokens || !len;
}

static bool cache_lookup(const struct call_batch *b, struct pending_llm_call *p) {
    struct store_call c;
    if (!b->client->store || p->call->failed || !store_call_get(b->client->store, p->key, &c))
        return false;
    bool fits = stored_result_fits(&c, p);
    if (fits) result_apply(&c, p);
    store_call_release(&c);
    return fits;
}

/* Runs one request of each call b->v[i].call. rationale: the second request of a judge's call. */
static int batch_run(struct call_batch *b, bool rationale, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < b->n; i++) {
        struct pending_llm_call *p = &b->v[i];
        rc = pending_prepare(b, p, rationale, err);
        p->cached = rc == OK && cache_lookup(b, p);
    }
    if (rc == OK) rc = run_cache_misses(b, err);
    if (rc == OK) rc = results_store(b, err);
    for (int i = 0; i < b->n; i++) {
        if (!b->v[i].cached) engine_request_release(&b->v[i].req);
        choice_prompt_release(&b->v[i].prompt);
    }
    return rc;
}

/* Generates the rationale of each judge's call in calls[n]. A rationale is the text before the
 * closing quote of a JSON string. */
static int rationales_run(struct call_batch *b, struct llm_call *calls, int n, struct error *err) {
    static const char pattern[] = "([^\"\\\\\\x00-\\x1f]){1,400}\"\\}";
    memset(b->v, 0, (size_t)b->n * sizeof *b->v);
    b->n = 0;
    for (int i = 0; i < n; i++)
        if (calls[i].reply == REPLY_JUDGE && !calls[i].failed) b->v[b->n++].call = &calls[i];
    if (b->n == 0) return OK;
    b->rationale = grammar_new_regex(pattern, strlen(pattern), err);
    int rc = b->rationale ? batch_run(b, true, err) : err->code;
    for (int i = 0; i < b->n; i++) {
        char *text = b->v[i].call->text;
        size_t end = text ? strcspn(text, "\"") : 0;
        if (text) text[end] = 0;
    }
    grammar_free(b->rationale);
    return rc;
}

static int ask_chunk(struct engine_client *client, struct llm_call *calls, int n, const char *model,
                     struct error *err) {
    struct call_batch b = {.client = client, .model = model, .v = xcalloc((size_t)n, sizeof *b.v)};
    for (int i = 0; i < n; i++) {
        calls[i].answer.choice = -1;
        if (calls[i].reply == REPLY_JUDGE && calls[i].n_candidates == 0)
            calls[i].failed = "there is nothing to judge";
        else
            b.v[b.n++].call = &calls[i];
    }
    int rc = batch_run(&b, false, err);
    if (rc == OK) rc = rationales_run(&b, calls, n, err);
    client->n_calls += n;
    free(b.v);
    return rc;
}

static int client_ask(void *ctx, struct llm_call *calls, int n, struct error *err) {
    struct engine_client *client = ctx;
    const char *model = model_hash(client->model, err);
    int rc = model ? OK : err->code;
    for (int i = 0; rc == OK && i < n; i += CALLS_PER_BATCH)
        rc = ask_chunk(client, calls + i, MIN(CALLS_PER_BATCH, n - i), model, err);
    return rc;
}

static int client_embed(void *ctx, const char *const *texts, int n, float **out, int32_t *d,
                        int64_t *n_tokens, struct error *err) {
    const struct engine_client *client = ctx;
    struct engine_embedder e = {.engine = client->engine,
                                .model = client->model,
                                .max_len = engine_max_len(client->engine)};
    struct embedder embedder;
    if (embedder_open(&embedder, &e, err) != OK) return err->code;
    *d = embedder.d;
    *out = xcalloc((size_t)n * (size_t)embedder.d, sizeof **out);
    int rc = embedder.embed(embedder.ctx, texts, n, *out, err);
    *n_tokens = e.n_tokens;
    if (rc == OK) return OK;
    free(*out);
    *out = NULL;
    return rc;
}

struct llm_client engine_client_as_llm(struct engine_client *client) {
    return (struct llm_client){client, client_ask, client->run ? NULL : client_embed};
}

const char *task_item_question(const struct task_item *it, int view) {
    return view >= 0 && it->n_views ? it->views[view % it->n_views] : it->question;
}

struct llm_call llm_call_question(const struct agent *agent, const struct task_item *item, int view,
                                  struct chat_message chat[2]) {
    int n = 0;
    if (agent->system) chat[n++] = (struct chat_message){"system", agent->system};
    chat[n++] = (struct chat_message){"user", task_item_question(item, view)};
    return (struct llm_call){.agent = agent,
                             .item = item,
                             .messages = chat,
                             .n_messages = n,
                             .reply = REPLY_ANSWER,
                             .top_p = 1};
}

void llm_call_release(struct llm_call *c) {
    free(c->text);
    free(c->ends);
    free(c->logprobs);
    c->text = NULL;
    c->ends = NULL;
    c->logprobs = NULL;
}
