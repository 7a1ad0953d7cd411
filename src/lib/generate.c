/*
 * generate: requests and embeddings of include/shoal.h. A request owns copies of its texts as
 * tokens and retains its adapters; the engine makes every decision.
 *
 * States of a request: new, submitted, finished. The engine borrows a submitted request, so it is
 * freed only when it is finished or cancelled.
 */
#include "lib/internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PUBLIC_CHOICES = 64 };

struct request_options {
    int64_t max_tokens, top_k, seed;
    double temperature, top_p, min_p, repeat_penalty;
    struct strings stop;
    char *json_schema, *grammar, *regex;
};
#define ROW(name, type, field, fallback, min, max)                                                 \
    { name, type, offsetof(struct request_options, field), fallback, min, max, NULL, NULL }
static const struct option_row request_rows[] = {
    ROW("max-tokens", OPT_INT, max_tokens, "256", 1, 1e9),
    ROW("temperature", OPT_FLOAT, temperature, "0", 0, 100),
    ROW("top-k", OPT_INT, top_k, "0", 0, 1e9),
    ROW("top-p", OPT_FLOAT, top_p, "1", 1e-9, 1),
    ROW("min-p", OPT_FLOAT, min_p, "0", 0, 1),
    ROW("repeat-penalty", OPT_FLOAT, repeat_penalty, "1", 0, 100),
    ROW("seed", OPT_INT, seed, "0", 0, 9e15),
    ROW("stop", OPT_LIST, stop, NULL, 0, 0),
    ROW("json-schema", OPT_STRING, json_schema, NULL, 0, 0),
    ROW("grammar", OPT_STRING, grammar, NULL, 0, 0),
    ROW("regex", OPT_STRING, regex, NULL, 0, 0),
    {0},
};
#undef ROW

struct shoal_request {
    const struct shoal *s;
    struct engine_request r;
    struct request_options options;
    struct token_ids prompt, choices[MAX_PUBLIC_CHOICES];
    struct token_seq choice_tokens[MAX_PUBLIC_CHOICES];
    struct weighted_adapter mix[ENGINE_MIX_MAX];
    int32_t n_mix, stop;
    struct grammar *grammar;
    struct buf text; /* the reply so far */
    bool submitted, cancelled;
};

/* making requests */

static int grammar_compile(struct shoal_request *r, struct error *err) {
    const struct request_options *o = &r->options;
    int n = (o->json_schema != NULL) + (o->grammar != NULL) + (o->regex != NULL);
    if (n == 0) return OK;
    if (n > 1) return error_set(err, ERR_USAGE, "give one of 'json-schema', 'grammar' and 'regex'");
    r->grammar = o->json_schema
                     ? grammar_new_json_schema(o->json_schema, strlen(o->json_schema), false, err)
                 : o->grammar ? grammar_new_gbnf(o->grammar, strlen(o->grammar), err)
                              : grammar_new_regex(o->regex, strlen(o->regex), err);
    return r->grammar ? OK : err->code;
}

static int request_init(struct shoal_request *r, struct error *err) {
    const struct request_options *o = &r->options;
    int32_t room = engine_max_len(r->s->engine) - r->prompt.n;
    if (grammar_compile(r, err) != OK) return err->code;
    if (room < 1)
        return error_set(err, ERR_USAGE,
                         "the prompt has %d tokens; 'max-model-len' allows %d with the reply",
                         r->prompt.n, engine_max_len(r->s->engine));
    r->stop = tokenizer_eot(r->s->model->tok);
    r->r = (struct engine_request){
        .prompt = r->prompt.v,
        .n_prompt = r->prompt.n,
        .sampling = {.temperature = (float)o->temperature,
                     .top_k = (int32_t)o->top_k,
                     .top_p = (float)o->top_p,
                     .min_p = (float)o->min_p,
                     .repetition_penalty = (float)o->repeat_penalty,
                     .seed = (uint64_t)o->seed},
        .max_tokens = (int32_t)MIN(o->max_tokens, (int64_t)room),
        .stop = &r->stop,
        .n_stop = r->stop >= 0,
        .stop_texts = (const char *const *)o->stop.v,
        .n_stop_texts = o->stop.n,
        .grammar = r->grammar,
    };
    return OK;
}

/* A text to continue, as `shoal run` encodes it. */
static int text_encode(const struct shoal *s, const char *text, struct token_ids *out,
                       struct error *err) {
    tokenizer_encode_prompt(s->model->tok, text, out);
    return out->n ? OK
                  : error_set(err, ERR_USAGE,
                              "the text is empty and the model has no token to begin with");
}

/* messages NULL: `text` is the text to continue. */
static struct shoal_request *request_make(struct shoal *s, const struct shoal_message *messages,
                                          int n, const char *text, const char *const *options,
                                          struct shoal_error *err) {
    struct error inner = {0};
    struct shoal_request *r = xcalloc(1, sizeof *r);
    r->s = s;
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = call_options_parse(request_rows, &r->options, options, &inner);
    if (rc == OK && messages)
        rc = messages_encode(s, messages, n, true, &r->prompt, NULL, &inner);
    else if (rc == OK)
        rc = text_encode(s, text, &r->prompt, &inner);
    if (rc == OK) rc = request_init(r, &inner);
    if (rc == OK) return r;
    error_copy(err, &inner);
    shoal_request_free(r);
    return NULL;
}

struct shoal_request *shoal_request_new(struct shoal *s, const struct shoal_message *messages,
                                        int n, const char *const *options,
                                        struct shoal_error *err) {
    return request_make(s, messages, n, NULL, options, err);
}

struct shoal_request *shoal_request_new_text(struct shoal *s, const char *text,
                                             const char *const *options, struct shoal_error *err) {
    return request_make(s, NULL, 0, text, options, err);
}

static bool is_running(const struct shoal_request *r) {
    return r->submitted && !r->r.done;
}

static void adapters_release(struct shoal_request *r) {
    for (int i = 0; i < r->n_mix; i++) adapter_release(r->mix[i].adapter);
    r->n_mix = 0;
}

void shoal_request_free(struct shoal_request *r) {
    if (!r) return;
    CHECK(!is_running(r));
    engine_request_release(&r->r);
    token_ids_release(&r->prompt);
    for (int i = 0; i < MAX_PUBLIC_CHOICES; i++) token_ids_release(&r->choices[i]);
    adapters_release(r);
    grammar_free(r->grammar);
    options_release(request_rows, &r->options);
    buf_release(&r->text);
    free(r);
}

static int check_new(const struct shoal_request *r, struct error *err) {
    return r->submitted ? error_set(err, ERR_STATE, "the request was submitted already") : OK;
}

int shoal_request_set_adapters(struct shoal_request *r, const struct shoal_adapter *const *adapters,
                               const float *weights, int n, struct shoal_error *err) {
    struct error inner = {0};
    int rc = check_new(r, &inner);
    if (rc == OK && (n < 0 || n > ENGINE_MIX_MAX))
        rc =
            error_set(&inner, ERR_USAGE, "%d adapters; at most %d are possible", n, ENGINE_MIX_MAX);
    for (int i = 0; rc == OK && i < n; i++)
        if (!adapters[i]) rc = error_set(&inner, ERR_USAGE, "adapter %d is NULL", i);
    if (rc != OK) return error_copy(err, &inner);
    adapters_release(r);
    for (int i = 0; i < n; i++)
        r->mix[i] =
            (struct weighted_adapter){.adapter = adapter_retain(adapter_unwrap(adapters[i])),
                                      .weight = weights ? weights[i] : 1};
    r->n_mix = n;
    bool plain = n == 1 && r->mix[0].weight == 1;
    r->r.adapter = plain ? r->mix[0].adapter : NULL;
    r->r.mix = plain || n == 0 ? NULL : r->mix;
    r->r.n_mix = plain ? 0 : n;
    return OK;
}

int shoal_request_set_choices(struct shoal_request *r, const char *const *choices, int n,
                              struct shoal_error *err) {
    struct error inner = {0};
    int rc = check_new(r, &inner);
    if (rc == OK && (n < 2 || n > MAX_PUBLIC_CHOICES))
        rc =
            error_set(&inner, ERR_USAGE, "%d choices; 2 to %d are possible", n, MAX_PUBLIC_CHOICES);
    if (rc == OK && r->grammar)
        rc = error_set(&inner, ERR_USAGE, "choices are the replies: no grammar goes with them");
    if (rc != OK) return error_copy(err, &inner);
    for (int i = 0; i < n; i++) {
        r->choices[i].n = 0;
        tokenizer_encode(r->s->model->tok, choices[i], strlen(choices[i]), 0, &r->choices[i]);
        if (r->stop >= 0) token_ids_add(&r->choices[i], r->stop);
        r->choice_tokens[i] = (struct token_seq){r->choices[i].v, r->choices[i].n};
    }
    r->r.choices = r->choice_tokens;
    r->r.n_choices = n;
    r->r.max_tokens = 0;
    return OK;
}

/* running */

int shoal_submit(struct shoal *s, struct shoal_request *r, struct shoal_error *err) {
    struct error inner = {0};
    int rc = model_check_idle(s, &inner);
    if (rc == OK) rc = check_new(r, &inner);
    if (rc == OK) rc = engine_submit(s->engine, &r->r, &inner);
    if (rc != OK) return error_copy(err, &inner);
    r->submitted = true;
    return OK;
}

int shoal_step(struct shoal *s, struct shoal_error *err) {
    struct error inner;
    if (model_check_idle(s, &inner) != OK) return error_copy(err, &inner);
    return engine_step(s->engine);
}

void shoal_cancel(struct shoal *s, struct shoal_request *r) {
    if (!is_running(r)) return;
    engine_cancel(s->engine, &r->r);
    r->cancelled = true;
}

/* Returns a submitted request to the state before. */
static void request_reset(struct shoal *s, struct shoal_request *r) {
    shoal_cancel(s, r);
    engine_request_release(&r->r);
    r->submitted = r->cancelled = false;
}

int shoal_run(struct shoal *s, struct shoal_request *const *requests, int n,
              const struct shoal_callbacks *callbacks, struct shoal_error *err) {
    struct error inner = {0};
    struct shoal_error submit = {0};
    struct call c;
    struct progress p;
    int rc = OK, done, submitted = 0;
    call_begin(&c, callbacks);
    for (; rc == OK && submitted < n; submitted++)
        rc = shoal_submit(s, requests[submitted], &submit);
    if (rc != OK) {
        submitted--; // the last one was refused
        error_set(&inner, rc, "request %d: %s", submitted, submit.text);
    }
    progress_start(&p, "requests", n);
    for (int left = n; rc == OK && left > 0;) {
        engine_step(s->engine);
        for (done = 0, left = n; left > 0 && done < n; done++) left -= requests[done]->r.done;
        progress_update(&p, n - left, NULL);
        if (left > 0) rc = log_check_cancelled(&inner);
    }
    for (int i = 0; rc != OK && i < submitted; i++) request_reset(s, requests[i]);
    return call_end(&c, rc, &inner, err);
}

/* results */

const char *shoal_request_text(struct shoal_request *r) {
    r->text.len = 0;
    buf_puts(&r->text, "");
    if (!r->submitted) return r->text.data;
    if (r->r.n_stop_texts && r->r.text.len)
        buf_add(&r->text, r->r.text.data, r->r.text.len);
    else if (!r->r.n_stop_texts)
        tokenizer_decode(r->s->model->tok, r->r.out, r->r.n_out, false, &r->text);
    if (!r->r.done) r->text.len = utf8_complete_len(r->text.data, r->text.len);
    r->text.data[r->text.len] = 0;
    return r->text.data;
}

const char *shoal_request_finish(const struct shoal_request *r) {
    if (r->cancelled) return "cancelled";
    return r->r.done ? finish_reason_name(r->r.finish) : "";
}

int shoal_request_choice(const struct shoal_request *r, float *probabilities) {
    if (!r->r.done || r->cancelled || !r->r.n_choices) return -1;
    if (probabilities)
        memcpy(probabilities, r->r.choice_prob, (size_t)r->r.n_choices * sizeof *probabilities);
    return r->r.choice;
}

struct shoal_usage shoal_request_usage(const struct shoal_request *r) {
    return (struct shoal_usage){.prompt_tokens = r->r.n_prefilled,
                                .cached_tokens = r->r.n_cached,
                                .completion_tokens = r->r.n_generated};
}

/* embeddings */

int shoal_embedding_size(const struct shoal *s) {
    return s->model->config.d_model;
}

int shoal_embed(struct shoal *s, const char *const *texts, int n,
                const struct shoal_adapter *adapter, float *out, struct shoal_error *err) {
    struct error inner = {0};
    struct token_ids *ids = xcalloc((size_t)MAX(n, 1), sizeof *ids);
    struct token_seq *seq = xcalloc((size_t)MAX(n, 1), sizeof *seq);
    int rc = model_check_idle(s, &inner);
    for (int i = 0; rc == OK && i < n; i++) {
        rc = text_encode(s, texts[i], &ids[i], &inner);
        seq[i] = (struct token_seq){ids[i].v, ids[i].n};
    }
    if (rc == OK) rc = engine_embed(s->engine, seq, n, adapter_unwrap(adapter), out, &inner);
    for (int i = 0; i < n; i++) token_ids_release(&ids[i]);
    free(ids);
    free(seq);
    return rc == OK ? OK : error_copy(err, &inner);
}
