/*
 * fallback_remote: the replies of remote links and of fixed replies, as generations of the API of
 * the request.
 *
 * A remote server gets the texts of the messages, or the prompt, and the common settings of
 * sampling. The link cannot answer requests that need the engine of this server (tools, grammars,
 * log-probabilities, token ids …): it fails, and nothing is sent. Its reply is text, at most
 * MAX_TEXT bytes. A fixed reply ignores all of this.
 */
#define _GNU_SOURCE
#include "serve/fallback.h"
#include "serve/sample_filter.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_TEXT = TRANSCRIPT_BYTES / 4 }; /* a completion and its writers hold some copies */

struct answer {
    struct fallback_attempt *a;
    struct exchange *part; /* retained, and so the attempt */
    json_t *request;       /* for a remote server, without the seed */
    uint64_t seed;
};

static void answer_free(struct answer *w) {
    exchange_release(w->part);
    json_decref(w->request);
    free(w);
}

/* requests */

/* The roles and texts of messages; NULL: one of them is more than text. */
static json_t *texts_of_messages(const json_t *messages) {
    json_t *out = json_array();
    const json_t *m;
    size_t i;
    json_array_foreach (messages, i, m) {
        json_t *content = json_object_get(m, "content");
        if (!json_is_string(content) || json_object_get(m, "tool_calls")) {
            json_decref(out);
            return NULL;
        }
        json_array_append_new(
            out, json_pack("{s:s,s:O}", "role", json_get_string(m, "role"), "content", content));
    }
    return out;
}

/* A part of the request that cannot be sent to a remote server; NULL: the request has no such part.
 */
static const char *unsuitable_part(const struct generation_spec *spec) {
    if (spec->tool_choice != TOOL_CHOICE_NONE) return "tools";
    if (spec->grammar) return "a grammar or schema of the reply";
    if (spec->logprobs || spec->prompt_logprobs || spec->prompt_tops) return "log-probabilities";
    if (spec->filter) return "samples and checks";
    if (spec->sampling.n_bias) return "logit_bias";
    if (spec->echo) return "echo";
    if (spec->n_prompts != 1) return "several prompts";
    return spec->request_json ? NULL : "token ids";
}

/* The request for a remote server; NULL: it cannot be sent, and the error says why. */
static json_t *remote_request(const struct generation_spec *spec, struct error *err) {
    const struct sampling_params *p = &spec->sampling;
    const char *part = unsuitable_part(spec);
    json_t *messages = json_object_get(spec->request_json, "messages"), *texts = NULL;
    if (!part && messages && !(texts = texts_of_messages(messages)))
        part = "messages that are more than text";
    if (part) {
        error_set(err, ERR_STATE, "a remote link cannot answer requests with %s", part);
        return NULL;
    }
    json_t *v = json_pack("{s:f,s:f,s:o*,s:O*}", "temperature", (double)p->temperature, "top_p",
                          (double)p->top_p, "messages", texts, "prompt",
                          texts ? NULL : json_object_get(spec->request_json, "prompt"));
    if (spec->max_tokens < INT32_MAX)
        json_object_set_new(v, "max_tokens", json_integer(spec->max_tokens));
    if (p->presence_penalty != 0)
        json_object_set_new(v, "presence_penalty", json_real((double)p->presence_penalty));
    if (p->frequency_penalty != 0)
        json_object_set_new(v, "frequency_penalty", json_real((double)p->frequency_penalty));
    if (spec->stop_texts.n) {
        json_t *stop = json_array();
        for (int i = 0; i < spec->stop_texts.n; i++)
            json_array_append_new(stop, json_string(spec->stop_texts.v[i]));
        json_object_set_new(v, "stop", stop);
    }
    return v;
}

/* replies */

struct text_target {
    struct generation *g;
    struct completion *a;
};

static void text_append(void *ctx, const char *text, size_t len) {
    const struct text_target *t = ctx;
    char *copy = xstrndup(text, len);
    generation_append(t->g, t->a, &(struct async_part){.content = copy});
    free(copy);
}

/* Whether a failure is one of the server, and not of this request. */
static bool is_fault(const struct answer *w, int status) {
    return !atomic_load(fallback_attempt_cancelled(w->a)) && status != 400 && status != 413 &&
           status != 422;
}

static void remote_answer(struct answer *w, struct generation *g, int i) {
    const struct fallback_link *l = fallback_attempt_link(w->a);
    struct text_target target = {g, &g->completions[i]};
    struct remote_attempt attempt = {.seconds = l->chain->settings.timeout,
                                     .max_text = MAX_TEXT,
                                     .cancel = fallback_attempt_cancelled(w->a),
                                     .on_text = g->spec.stream ? text_append : NULL,
                                     .ctx = &target};
    struct remote_reply reply;
    struct error err;
    // some servers read the seed as 32 bits
    json_object_set_new(w->request, "seed",
                        json_integer((json_int_t)((w->seed + (uint64_t)i) & INT32_MAX)));
    int rc = remote_try(l->remote, w->request, &attempt, &reply, &err);
    const struct token_usage usage = {.prompt = reply.prefilled, .completion = reply.generated};
    if (rc != OK && is_fault(w, reply.status)) fallback_attempt_blame(w->a);
    if (rc != OK) err.code = ERR_STATE; // it is not an error of the request, nor of this server
    generation_append(g, target.a,
                      &(struct async_part){.content = reply.text,
                                           .usage = &usage,
                                           .error = rc == OK ? NULL : &err,
                                           .truncated = reply.truncated,
                                           .done = true});
    remote_reply_release(&reply);
}

static void answer_run(struct generation *g, void *ctx) {
    struct answer *w = ctx;
    const struct fallback_link *l = fallback_attempt_link(w->a);
    for (int i = 0; i < g->n_completions; i++)
        if (l->remote)
            remote_answer(w, g, i);
        else
            generation_append(g, &g->completions[i],
                              &(struct async_part){.content = l->settings->reply, .done = true});
    answer_free(w);
}

/* Removes the settings that only the engine can apply. */
static void spec_simplify(struct server *s, struct generation_spec *spec) {
    for (int i = 0; i < spec->n_prompts; i++) token_ids_release(&spec->prompts[i]);
    if (spec->grammar) server_grammar_release(s, spec->grammar);
    sample_filter_free(spec->filter);
    spec->grammar = NULL;
    spec->filter = NULL;
    spec->n_top = spec->n_prompt_top = 0;
    spec->logprobs = spec->prompt_logprobs = spec->prompt_tops = spec->echo = false;
    spec->tool_choice = TOOL_CHOICE_NONE;
    spec->reasoning_begin = REASONING_NONE;
}

bool fallback_generation_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                               const char *id_prefix, struct model_ref *t,
                               struct generation_spec *spec) {
    struct fallback_attempt *a = fallback_attempt_of(x);
    const struct fallback_link *l = a ? fallback_attempt_link(a) : NULL;
    struct error err;
    if (!l || (!l->remote && !l->settings->reply)) return false;
    json_t *request = l->remote ? remote_request(spec, &err) : NULL;
    if (l->remote && !request) {
        generation_fail(s, x, t, spec, &err);
        return true;
    }
    struct answer *w = xcalloc(1, sizeof *w);
    *w = (struct answer){
        .a = a, .part = exchange_retain(x), .request = request, .seed = spec->sampling.seed};
    spec_simplify(s, spec);
    model_ref_release(t);
    *t = (struct model_ref){.name = xstrdup(l->remote ? l->settings->model : l->settings->name),
                            .label = xstrdup("fallback"),
                            .is_elsewhere = true};
    if (!generation_start_async(s, x, d, id_prefix, t, spec, answer_run, w)) answer_free(w);
    return true;
}
