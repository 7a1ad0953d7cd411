/*
 * policy_runner: one batch of decisions.
 *
 * The engine prefills a prompt, and the policy is exactly the next token's probabilities over the
 * action tokens: nothing is generated or parsed. Only `text` generates and parses; a text
 * without an action becomes a random action.
 *
 * Not here: the content of prompts, the choice of agents, the effects of actions.
 */
#include "world/world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_TOKENS = 10, ROWS = 256, SEQS = 64, LEN = 256 };

struct policy_runner {
    const struct model *m;
    const struct environment *e;
    struct policy_runner_options o;
    struct engine_options engine_options;
    struct engine *engine; /* NULL while asleep */
    int32_t choices[ENV_MAX_ACTIONS];
    struct token_seq seqs[ENV_MAX_ACTIONS];
    struct engine_request *requests; /* [cap] */
    int cap;
    struct token_ids tokens; /* token ids of all prompts, concatenated */
};

static int choices_make(struct policy_runner *a, struct error *err) {
    for (int i = 0; i < a->e->n_actions; i++) {
        struct token_ids ids = {0};
        struct buf word = {0};
        buf_printf(&word, " %s", a->e->actions[i]);
        tokenizer_encode(a->m->tok, word.data, word.len, 0, &ids);
        a->choices[i] = ids.n ? ids.v[0] : -1;
        a->seqs[i] = (struct token_seq){&a->choices[i], 1};
        token_ids_release(&ids);
        buf_release(&word);
        for (int j = 0; j <= i; j++)
            if (a->choices[i] < 0 || (j < i && a->choices[j] == a->choices[i]))
                return error_set(err, ERR_MISMATCH,
                                 "the tokenizer of '%s' begins '%s' and '%s' with one token: it "
                                 "cannot distinguish the actions",
                                 a->m->name, a->e->actions[j], a->e->actions[i]);
    }
    return OK;
}

static int wake_up(struct policy_runner *a, struct error *err) {
    if (!a->engine) a->engine = engine_new(a->m, &a->engine_options, err);
    return a->engine ? OK : err->code;
}

enum dtype policy_runner_lora_elem(const struct policy_runner *a) {
    return a->o.lora_elem;
}

void policy_runner_sleep(struct policy_runner *a) {
    engine_free(a->engine);
    a->engine = NULL;
}

struct policy_runner *policy_runner_new(const struct model *m, const struct environment *e,
                                        const struct policy_runner_options *o, struct error *err) {
    CHECK(e->n_actions > 0 && e->n_actions <= ENV_MAX_ACTIONS);
    struct policy_runner *a = xcalloc(1, sizeof *a);
    a->m = m;
    a->e = e;
    a->o = *o;
    a->engine_options = (struct engine_options){.max_rows = o->max_rows ? o->max_rows : ROWS,
                                                .max_seqs = o->max_seqs ? o->max_seqs : SEQS,
                                                .max_len = o->max_len ? o->max_len : LEN,
                                                .max_cached = 1,
                                                .n_pages = o->n_pages,
                                                .kv_elem = o->kv_elem,
                                                .lora_elem = o->lora_elem,
                                                .pool = o->pool};
    a->engine_options.max_len = MIN(a->engine_options.max_len, m->config.max_seq_len);
    if (!m->tok)
        error_set(err, ERR_MISMATCH, "'%s' has no tokenizer", m->name);
    else if (o->text || choices_make(a, err) == OK)
        wake_up(a, err);
    if (a->engine) return a;
    policy_runner_free(a);
    return NULL;
}

void policy_runner_free(struct policy_runner *a) {
    if (!a) return;
    engine_free(a->engine);
    token_ids_release(&a->tokens);
    free(a->requests);
    free(a);
}

const int32_t *policy_runner_action_tokens(const struct policy_runner *a) {
    return a->choices;
}

void policy_runner_tokenize(struct policy_runner *a, struct policy_decision *asks, int n,
                            const struct buf *text) {
    int32_t *at = xcalloc((size_t)n + 1, sizeof *at);
    a->tokens.n = 0;
    for (int i = 0; i < n; i++) {
        tokenizer_encode(a->m->tok, text->data + asks[i].at, asks[i].len, TOKENIZER_ADD_BOS,
                         &a->tokens);
        at[i + 1] = a->tokens.n;
    }
    for (int i = 0; i < n; i++) { // only now, because adding tokens may move the list
        asks[i].tokens = a->tokens.v + at[i];
        asks[i].n = at[i + 1] - at[i];
    }
    free(at);
}

static void request_fill(struct policy_runner *a, struct engine_request *r,
                         struct policy_decision *ask) {
    *r = (struct engine_request){.prompt = ask->tokens,
                                 .n_prompt = ask->n,
                                 .adapter = ask->n_mix ? NULL : ask->adapter,
                                 .mix = ask->n_mix ? ask->mix : NULL,
                                 .n_mix = ask->n_mix};
    if (a->o.text) {
        r->sampling = (struct sampling_params){.temperature = (float)a->o.temperature, .top_p = 1};
        r->sampling.seed = rng_u64(&ask->rng);
        r->max_tokens = TEXT_TOKENS;
        return;
    }
    r->choices = a->seqs;
    r->n_choices = a->e->n_actions;
    r->logprob_temperature = (float)a->o.temperature;
}

/* Chooses an action by sampling. The engine's log-probabilities are normalised over the vocabulary,
 * so this normalises them over the actions. */
static void choice_draw(const struct policy_runner *a, const struct engine_request *r,
                        struct policy_decision *ask) {
    int n = a->e->n_actions;
    double most = -INFINITY, sum = 0, left = (double)rng_uniform(&ask->rng);
    for (int i = 0; i < n; i++) most = fmax(most, (double)r->choice_logprob[i]);
    for (int i = 0; i < n; i++) sum += math_exp((double)r->choice_logprob[i] - most);
    double norm = most + math_log(sum);
    ask->action = -1;
    for (int i = 0; i < n; i++) {
        ask->logp[i] = (double)r->choice_logprob[i] - norm;
        double p = math_exp(ask->logp[i]);
        if (ask->action < 0 && left < p) ask->action = i;
        left -= p;
    }
    for (int i = 0; ask->action < 0 && i < n; i++) // a rest remains after rounding: the most
                                                   // probable action
        if ((double)r->choice_logprob[i] >= most) ask->action = i;
    if (ask->action < 0) ask->action = 0; // all log-probabilities are NaN
}

static void text_read(const struct policy_runner *a, const struct engine_request *r,
                      struct policy_decision *ask) {
    struct buf b = {0};
    tokenizer_decode(a->m->tok, r->out, r->n_out, false, &b);
    ask->action = a->e->parse(a->e->ctx, b.data ? b.data : "");
    if (ask->action < 0) ask->action = (int)rng_below(&ask->rng, (uint32_t)a->e->n_actions);
    memset(ask->logp, 0, sizeof ask->logp);
    buf_release(&b);
}

int policy_runner_act(struct policy_runner *a, struct policy_decision *asks, int n,
                      const struct buf *text, struct error *err) {
    if (wake_up(a, err) != OK) return err->code;
    if (n > a->cap) {
        a->cap = n;
        a->requests = xrealloc(a->requests, (size_t)n * sizeof *a->requests);
    }
    policy_runner_tokenize(a, asks, n, text);
    for (int i = 0; i < n; i++) request_fill(a, &a->requests[i], &asks[i]);
    int rc = engine_run(a->engine, a->requests, n, NULL, err);
    for (int i = 0; i < n; i++) {
        struct engine_request *r = &a->requests[i];
        if (rc == OK && a->o.text) text_read(a, r, &asks[i]);
        if (rc == OK && !a->o.text) choice_draw(a, r, &asks[i]);
        engine_request_release(r);
    }
    return rc;
}
