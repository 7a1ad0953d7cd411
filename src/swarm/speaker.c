/*
 * The asker on an engine: turns become requests, requests get their identity, what the store knows
 * is not computed again, the rest runs in one heterogeneous batch and is written down in one
 * transaction.
 */
#define _GNU_SOURCE
#include "swarm/swarm.h"

#include <stdlib.h>
#include <string.h>

struct pending {
    struct asked asked;
    struct request req;
    char key[HASH_LEN];
    bool known;
};

/* The chat so far as the model sees it; strings made here go to own[]. */
static int turn_chat(const struct turn *t, struct message msgs[5], char *own[2]) {
    int n = 0;
    if (t->agent->system) msgs[n++] = (struct message){"system", t->agent->system};
    msgs[n++] = (struct message){"user", t->item->question};
    if (t->own) {
        own[0] = xasprintf(ANSWER_PREFIX " %s", t->own);
        own[1] = fry_debate_turn(t->others, t->n_others);
        msgs[n++] = (struct message){"assistant", own[0]};
        msgs[n++] = (struct message){"user", own[1]};
    }
    return n;
}

static int prepare(struct speaker *s, const struct turn *t, const char *model, struct pending *p,
                   struct error *err) {
    struct message msgs[5];
    char *own[2] = {NULL, NULL};
    int n = turn_chat(t, msgs, own);
    int rc = asked_init(&p->asked, s->model->tok, msgs, n, t->item, t->working, err);
    asked_request(&p->asked, t->agent->adapter, s->max_tokens, &p->req);
    p->req.sampling.temperature = t->temperature;
    p->req.sampling.seed =
        t->temperature > 0 ? t->seed : 0; /* greedy calls are the same call whatever the seed */
    request_key(&p->req, model, s->model->cls, p->key);
    free(own[0]);
    free(own[1]);
    return rc;
}

static void recall(const struct stored_call *c, struct turn *t) {
    t->answer.choice = c->choice;
    memcpy(t->answer.prob, c->prob, sizeof t->answer.prob);
    t->n_prefilled = c->n_prefilled;
    t->n_generated = c->n_generated;
    t->truncated = c->finish;
}

static int keep(struct speaker *s, const struct pending *p, const struct turn *t,
                struct error *err) {
    struct stored_call c = {.choice = t->answer.choice,
                            .n_choices = p->req.n_choices,
                            .n_prefilled = t->n_prefilled,
                            .n_generated = t->n_generated,
                            .finish = t->truncated};
    struct buf text = {0};
    memcpy(c.key, p->key, HASH_LEN);
    memcpy(c.prob, t->answer.prob, sizeof c.prob);
    tok_decode_all(s->model->tok, p->req.out, p->req.n_out, false, &text);
    c.text = text.data;
    int rc = store_call_put(s->store, &c, err);
    buf_release(&text);
    return rc;
}

static void learn(const struct request *r, struct turn *t) {
    t->answer.choice = r->choice;
    for (int i = 0; i < r->n_choices; i++) t->answer.prob[i] = r->choice_prob[i];
    t->n_prefilled = r->n_prefilled;
    t->n_generated = r->n_generated;
    t->truncated = r->max_tokens > 0 && r->n_out == r->max_tokens;
}

/* Runs what the store did not know, as one array of requests. */
static int compute(struct speaker *s, struct pending *p, struct turn *turns, int n,
                   struct error *err) {
    struct request *reqs = xcalloc((size_t)MAX(n, 1), sizeof *reqs);
    int m = 0, rc = OK;
    for (int i = 0; i < n; i++)
        if (!p[i].known) reqs[m++] = p[i].req;
    if (m > 0) rc = engine_run(s->engine, reqs, m, NULL, err);
    for (int i = 0, j = 0; i < n; i++) {
        if (p[i].known) continue;
        p[i].req = reqs[j++];
        if (rc == OK) learn(&p[i].req, &turns[i]);
    }
    s->computed += m;
    free(reqs);
    return rc;
}

static int keep_all(struct speaker *s, const struct pending *p, const struct turn *turns, int n,
                    struct error *err) {
    int rc = store_begin(s->store, err);
    for (int i = 0; rc == OK && i < n; i++)
        if (!p[i].known) rc = keep(s, &p[i], &turns[i], err);
    if (rc == OK) rc = store_commit(s->store, err);
    if (rc != OK) store_rollback(s->store);
    return rc;
}

static int ask_chunk(struct speaker *s, struct turn *turns, int n, const char *model,
                     struct error *err) {
    struct pending *p = xcalloc((size_t)n, sizeof *p);
    struct stored_call c;
    int rc = OK;
    for (int i = 0; rc == OK && i < n; i++) {
        rc = prepare(s, &turns[i], model, &p[i], err);
        p[i].known = rc == OK && s->store && store_call_get(s->store, p[i].key, &c);
        if (!p[i].known) continue;
        recall(&c, &turns[i]);
        free(c.text);
    }
    if (rc == OK) rc = compute(s, p, turns, n, err);
    if (rc == OK && s->store) rc = keep_all(s, p, turns, n, err);
    for (int i = 0; i < n; i++) {
        if (!p[i].known) request_release(&p[i].req);
        asked_release(&p[i].asked);
    }
    s->asked += n;
    free(p);
    return rc;
}

static int ask(void *ctx, struct turn *turns, int n, struct error *err) {
    struct speaker *s = ctx;
    const char *model = model_hash(s->model, err);
    int rc = model ? OK : err->code;
    for (int i = 0; rc == OK && i < n; i += 4096)
        rc = ask_chunk(s, turns + i, MIN(4096, n - i), model, err);
    return rc;
}

struct asker speaker_asker(struct speaker *s) {
    return (struct asker){s, ask};
}
