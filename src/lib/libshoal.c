/*
 * libshoal: the public library, include/shoal.h. It translates chat requests into requests of one
 * engine, and their results into texts or choices; the engine makes every decision. Its structs are
 * opaque, so that the internals may change.
 */
#define _GNU_SOURCE
#include "shoal.h"

#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_PUBLIC_CHOICES = 64 };

struct shoal {
    struct pool *pool;
    struct model *model;
    struct engine *engine;
};

/* struct shoal_adapter is never defined; a pointer to it is a pointer to a struct adapter. */
static struct adapter *adapter_unwrap(const struct shoal_adapter *a) {
    return (struct adapter *)(uintptr_t)a;
}

static int error_copy(struct shoal_error *out, const struct error *err) {
    if (out) {
        out->code = err->code;
        snprintf(out->text, sizeof out->text, "%s", err->text);
    }
    return err->code;
}

const char *shoal_version(void) {
    return SHOAL_VERSION;
}

struct shoal *shoal_open(const char *model, int threads, int exact, struct shoal_error *err) {
    struct error inner = {0};
    struct shoal *s = xcalloc(1, sizeof *s);
    s->pool = pool_new(threads);
    s->model = model_open(model, exact ? NUMERIC_EXACT : kernels_default_class(), &inner);
    struct engine_options o = {.pool = s->pool};
    if (s->model) o.kv_elem = kv_cache_default_dtype(s->model->cls);
    if (s->model && !s->model->tok)
        error_set(&inner, ERR_MISMATCH, "'%s' has no tokenizer", model);
    else if (s->model)
        s->engine = engine_new(s->model, &o, &inner);
    if (s->engine) return s;
    error_copy(err, &inner);
    shoal_close(s);
    return NULL;
}

void shoal_close(struct shoal *s) {
    if (!s) return;
    engine_free(s->engine);
    model_close(s->model);
    pool_free(s->pool);
    free(s);
}

struct shoal_adapter *shoal_adapter_load(struct shoal *s, const char *dir,
                                         struct shoal_error *err) {
    struct error inner = {0};
    struct adapter *a = adapter_open(dir, s->model, &inner);
    if (!a) error_copy(err, &inner);
    return (struct shoal_adapter *)a;
}

void shoal_adapter_free(struct shoal_adapter *a) {
    adapter_release(adapter_unwrap(a));
}

const char *shoal_adapter_hash(const struct shoal_adapter *a) {
    return adapter_unwrap(a)->hash;
}

/* The tokens of one public request, which its engine request borrows. */
struct request_tokens {
    struct token_ids prompt, choices[MAX_PUBLIC_CHOICES];
    struct token_seq seq[MAX_PUBLIC_CHOICES];
    int32_t stop[2];
};

static int request_translate(const struct shoal *s, const struct shoal_request *r,
                             struct request_tokens *t, struct engine_request *out,
                             struct error *err) {
    const struct tokenizer *tok = s->model->tok;
    struct chat_message msgs[2] = {{"system", r->system}, {"user", r->user}};
    int n_stop = 0, n_choices = r->choices ? r->n_choices : 0;
    if (!r->user) return error_set(err, ERR_USAGE, "a request has no user message");
    if (n_choices < 0 || n_choices > MAX_PUBLIC_CHOICES)
        return error_set(err, ERR_USAGE, "%d choices; 1 to %d are possible", n_choices,
                         MAX_PUBLIC_CHOICES);
    if (chat_encode(tok, msgs + !r->system, 1 + !!r->system, true, &t->prompt, NULL, err) != OK)
        return err->code;
    int32_t end = tokenizer_eot(tok);
    if (end >= 0) t->stop[n_stop++] = end;
    for (int i = 0; i < n_choices; i++) {
        tokenizer_encode(tok, r->choices[i], strlen(r->choices[i]), 0, &t->choices[i]);
        if (end >= 0) token_ids_add(&t->choices[i], end);
        t->seq[i] = (struct token_seq){t->choices[i].v, t->choices[i].n};
    }
    *out = (struct engine_request){
        .prompt = t->prompt.v,
        .n_prompt = t->prompt.n,
        .adapter = adapter_unwrap(r->adapter),
        .sampling = {.temperature = r->temperature, .top_p = 1, .seed = r->seed},
        .max_tokens = n_choices ? 0 : r->max_tokens,
        .stop = t->stop,
        .n_stop = n_stop,
        .choices = t->seq,
        .n_choices = n_choices};
    return OK;
}

static void result_store(const struct shoal *s, struct engine_request *in,
                         struct shoal_request *r) {
    struct buf text = {0};
    buf_puts(&text, "");
    tokenizer_decode(s->model->tok, in->out, in->n_out, false, &text);
    r->text = text.data;
    r->probability = in->choice_prob;
    in->choice_prob = NULL;
    r->choice = in->choice;
    r->n_prefilled = in->n_prefilled;
    r->n_generated = in->n_generated;
}

int shoal_run(struct shoal *s, struct shoal_request *requests, int n, struct shoal_error *err) {
    struct error inner = {0};
    struct request_tokens *t = xcalloc((size_t)MAX(n, 1), sizeof *t);
    struct engine_request *reqs = xcalloc((size_t)MAX(n, 1), sizeof *reqs);
    int rc = OK;
    for (int i = 0; rc == OK && i < n; i++)
        rc = request_translate(s, &requests[i], &t[i], &reqs[i], &inner);
    if (rc == OK) rc = engine_run(s->engine, reqs, n, NULL, &inner);
    for (int i = 0; i < n; i++) {
        if (rc == OK) result_store(s, &reqs[i], &requests[i]);
        engine_request_release(&reqs[i]);
        token_ids_release(&t[i].prompt);
        for (int c = 0; c < MAX_PUBLIC_CHOICES; c++) token_ids_release(&t[i].choices[c]);
    }
    free(t);
    free(reqs);
    return rc == OK ? 0 : error_copy(err, &inner);
}

void shoal_request_release(struct shoal_request *r) {
    free(r->text);
    free(r->probability);
    r->text = NULL;
    r->probability = NULL;
}
