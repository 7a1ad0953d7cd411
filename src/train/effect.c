/*
 * effect: what a training changed: the mean loss of the same samples before and after it, and the
 * model's greedy replies to some of their prompts.
 *
 * The losses that a run logs are of different samples at its start and at its end, each computed
 * before its update; a run whose last updates were bad can end with a good last loss.
 */
#define _GNU_SOURCE
#include "train/train.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SAMPLES = 64, MAX_TOKENS = 2048, MAX_REPLIES = 5, REPLY_TOKENS = 48 };

/* Keeps samples of d, evenly spaced: at most MAX_SAMPLES and MAX_TOKENS, but one at least. */
struct dataset train_samples_keep(const struct dataset *d) {
    struct dataset kept = {.v = xcalloc(MAX_SAMPLES, sizeof *kept.v)};
    int n = MIN(d->n, MAX_SAMPLES);
    for (int i = 0; i < n; i++) {
        const struct train_sample *s = &d->v[(int64_t)i * d->n / n];
        if (kept.n > 0 && kept.tokens + s->n > MAX_TOKENS) break;
        kept.v[kept.n++] = train_sample_copy(s);
        kept.tokens += s->n;
    }
    return kept;
}

/* The number of tokens before the first target. */
static int32_t prompt_length(const struct train_sample *s) {
    int32_t n = 0;
    while (n < s->n && !s->mask[n]) n++;
    return n;
}

/* Targets of the first answer of a sample, without the stop token. */
static int32_t answer_length(const struct train_sample *s, int32_t from, int32_t stop) {
    int32_t n = 0;
    while (from + n < s->n && s->mask[from + n] && s->tokens[from + n] != stop) n++;
    return n;
}

/* The text of tokens without control tokens and outer white space. */
static json_t *text_json(const struct tokenizer *tok, const int32_t *ids, int32_t n) {
    struct buf text = {0};
    tokenizer_decode(tok, ids, n, false, &text);
    buf_add(&text, "", 1);
    char *begin = text.data + strspn(text.data, " \n"), *end = strchr(begin, '\0');
    while (end > begin && (end[-1] == ' ' || end[-1] == '\n')) end--;
    json_t *v = json_stringn(begin, (size_t)(end - begin));
    buf_release(&text);
    return v ? v : json_string("");
}

static bool is_role(const char *name) {
    static const char *const roles[] = {"system", "user", "assistant",
                                        "model",  "tool", "developer"};
    for (size_t i = 0; i < ARRAY_LEN(roles); i++)
        if (strcmp(name, roles[i]) == 0) return true;
    return false;
}

/* The message of a span between two special tokens, without the role before it; empty: only a role.
 */
static json_t *message_json(const struct tokenizer *tok, const int32_t *ids, int32_t n) {
    json_t *text = text_json(tok, ids, n);
    const char *line = json_string_value(text), *end = strchr(line, '\n');
    char *role = end ? xstrndup(line, (size_t)(end - line)) : xstrdup(line);
    if (is_role(role)) json_string_set(text, end ? end + 1 : "");
    free(role);
    return text;
}

/* The last message of a prompt: the text after the last special token that has one. */
static json_t *prompt_json(const struct tokenizer *tok, const int32_t *ids, int32_t n) {
    json_t *text = NULL;
    for (int32_t end = n, begin; end > 0; end = begin - 1) {
        for (begin = end; begin > 0 && !tokenizer_is_special(tok, ids[begin - 1]);) begin--;
        json_decref(text);
        text = message_json(tok, ids + begin, end - begin);
        if (json_string_length(text) > 0) break;
    }
    return text ? text : json_string("");
}

/* Prompts and replies: requests 2i and 2i + 1 are of the adapters before and after. */
static int replies_generate(struct engine *e, const struct train_sample *v, int n,
                            struct adapter *before, struct adapter *after, int32_t stop,
                            struct engine_request *requests, struct error *err) {
    int rc = OK;
    for (int i = 0; rc == OK && i < 2 * n; i++) {
        requests[i] = (struct engine_request){.prompt = v[i / 2].tokens,
                                              .n_prompt = prompt_length(&v[i / 2]),
                                              .adapter = i % 2 ? after : before,
                                              .sampling = {.temperature = 0, .top_p = 1},
                                              .max_tokens = REPLY_TOKENS,
                                              .stop = &stop,
                                              .n_stop = 1};
        rc = engine_submit(e, &requests[i], err);
    }
    while (engine_step(e) > 0) continue;
    return rc;
}

static json_t *replies_json(const struct tokenizer *tok, const struct train_sample *v, int n,
                            int32_t stop, const struct engine_request *requests) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        int32_t prompt = prompt_length(&v[i]);
        const struct engine_request *r = &requests[2 * i];
        json_array_append_new(list, json_pack("{s:o,s:o,s:o,s:o}", "prompt",
                                              prompt_json(tok, v[i].tokens, prompt), "answer",
                                              text_json(tok, v[i].tokens + prompt,
                                                        answer_length(&v[i], prompt, stop)),
                                              "before", text_json(tok, r[0].out, r[0].n_out),
                                              "after", text_json(tok, r[1].out, r[1].n_out)));
    }
    return list;
}

/* Sets out->replies to those of the first samples that have a prompt. */
static int replies_measure(const struct model *m, const struct dataset *d, struct adapter *before,
                           struct adapter *after, enum dtype kv, const struct engine_limits *limits,
                           struct pool *pool, struct train_effect *out, struct error *err) {
    const int64_t most = limits->max_len ? limits->max_len : m->config.max_seq_len - 1;
    struct train_sample v[MAX_REPLIES];
    struct engine_request requests[2 * MAX_REPLIES] = {{0}};
    struct engine_options eo = {.max_seqs = 2 * MAX_REPLIES, .kv_elem = kv, .pool = pool};
    int n = 0;
    for (int i = 0; i < d->n && n < MAX_REPLIES; i++)
        if (prompt_length(&d->v[i]) > 0 && prompt_length(&d->v[i]) + REPLY_TOKENS <= most) {
            v[n++] = d->v[i];
            eo.max_len = MAX(eo.max_len, prompt_length(&d->v[i]) + REPLY_TOKENS);
        }
    if (n == 0) return OK;
    if (limits->max_seqs) eo.max_seqs = (int32_t)MIN(limits->max_seqs, eo.max_seqs);
    struct engine *e = engine_options_limit(m, &eo, err) == OK ? engine_new(m, &eo, err) : NULL;
    if (!e) return err->code;
    int32_t stop = tokenizer_eot(m->tok);
    int rc = replies_generate(e, v, n, before, after, stop, requests, err);
    if (rc == OK) out->replies = replies_json(m->tok, v, n, stop, requests);
    for (int i = 0; i < 2 * n; i++) engine_request_release(&requests[i]);
    engine_free(e);
    return rc;
}

static double mean(const double *v, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += v[i];
    return sum / n;
}

int train_effect_measure(const struct model *m, const struct dataset *d, struct adapter *before,
                         struct adapter *after, enum dtype kv, const struct engine_limits *limits,
                         struct pool *pool, struct train_effect *out, struct error *err) {
    *out = (struct train_effect){.n = d->n};
    if (d->n == 0) return OK;
    double *nll = xcalloc((size_t)d->n, sizeof *nll);
    int rc = gate_eval_nll(m, before, d, kv, pool, nll, err);
    out->before = mean(nll, d->n);
    if (rc == OK) rc = gate_eval_nll(m, after, d, kv, pool, nll, err);
    out->after = mean(nll, d->n);
    free(nll);
    return rc == OK ? replies_measure(m, d, before, after, kv, limits, pool, out, err) : rc;
}

json_t *train_effect_json(const struct train_effect *e) {
    if (e->n == 0) return json_null();
    return json_pack("{s:i,s:f,s:f,s:O}", "samples", e->n, "before", e->before, "after", e->after,
                     "replies", e->replies ? e->replies : json_null());
}

void train_effect_warn(const struct train_result *r) {
    const struct train_effect *e = &r->effect;
    if (e->n > 0 && e->after >= e->before)
        log_warn("'%s' became worse: its loss on %d %s samples rose from %.4f to %.4f; try a lower "
                 "--lr, or more --epochs if there were few updates",
                 r->job->name, e->n, r->gate.eval.n ? "held-out" : "of its own", e->before,
                 e->after);
}
