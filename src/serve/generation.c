/*
 * generation: converts settings to batcher requests, tokens to text, and text to an API's deltas.
 *
 * The first `shown` bytes of a completion's text are final: the engine can cut the text at a stop
 * text only after them, because a possible beginning of a stop text is held back. Within these
 * bytes, the text after the reasoning and before the first tool call is content.
 */
#define _GNU_SOURCE
#include "serve/generation.h"
#include "serve/auto_model.h"
#include "serve/sample_filter.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistr.h>

/* text as JSON */

json_t *json_token_text(const struct server *s, int32_t id) {
    struct buf b = {0}, hex = {0};
    tokenizer_decode_token(s->model->tok, id, true, &b);
    bool text = b.len == 0 || !u8_check((const uint8_t *)b.data, b.len);
    buf_puts(&hex, "bytes:");
    for (size_t i = 0; !text && i < b.len; i++) buf_printf(&hex, "\\x%02x", (uint8_t)b.data[i]);
    json_t *v = text ? json_stringn(b.data ? b.data : "", b.len) : json_string(hex.data);
    buf_release(&b);
    buf_release(&hex);
    return v;
}

json_t *json_logprob(float v) {
    return json_real(isfinite(v) ? (double)v : -9999.0);
}

/* replies as text */

static int dump_to_buf(const char *p, size_t n, void *out) {
    buf_add(out, p, n);
    return 0;
}

static void json_append_text(json_t *v, size_t flags, struct buf *out) {
    CHECK(json_dump_callback(v, dump_to_buf, out, flags | JSON_COMPACT | JSON_ENCODE_ANY) == 0);
    json_decref(v);
}

/* The prefix that all placeholders of a generation share, as jansson writes it. */
static void placeholder_prefix(const struct generation *g, char out[32]) {
    snprintf(out, 32, "\"\\u0001%016llx ", (unsigned long long)g->nonce);
}

json_t *lazy_list_placeholder(const struct generation *g, const struct lazy_list *l) {
    return json_sprintf("\x01%016llx %d %d %d %d %lld", (unsigned long long)g->nonce, l->kind,
                        l->index, l->from, l->to, (long long)l->offset);
}

static bool has_lists(const struct generation *g) {
    return g && (g->spec.logprobs || g->spec.prompt_tops);
}

/* Appends v as text, and replaces placeholders by the lists that the dialect writes. Takes v over.
 */
static void reply_serialize(const struct generation *g, json_t *v, size_t flags, struct buf *out) {
    struct buf text = {0};
    char mark[32];
    if (!has_lists(g)) {
        json_append_text(v, flags, out);
        return;
    }
    json_append_text(v, flags, &text);
    placeholder_prefix(g, mark);
    const char *p = text.data, *at;
    for (; (at = strstr(p, mark)); p = strchr(at + strlen(mark), '"') + 1) {
        struct lazy_list l = {.flags = flags};
        long long offset;
        CHECK(sscanf(at + strlen(mark), "%d %d %d %d %lld", &l.kind, &l.index, &l.from, &l.to,
                     &offset) == 5);
        l.offset = offset;
        buf_add(out, p, (size_t)(at - p));
        g->dialect->write_list(g, &l, out);
    }
    buf_puts(out, p);
    buf_release(&text);
}

/* Reserves 5/4 of the text's length. This is enough for a growing buffer: a large one grows in
 * place, and its unused end has no pages yet. */
static bool reply_reserve(const struct generation *g, const struct buf *out) {
    struct reply_budget *room = g->room;
    size_t need = out->len + out->len / 4;
    struct error err;
    if (need <= room->bytes || room->refused) return !room->refused;
    size_t more = need - room->bytes + (1 << 20);
    room->refused = memory_budget_reserve(g->s->memory, g, more, &err) != OK;
    if (!room->refused) room->bytes += more;
    return !room->refused;
}

bool lazy_list_add(const struct generation *g, const struct lazy_list *l, json_t *v,
                   struct buf *out) {
    char last = out->len ? out->data[out->len - 1] : 0;
    if (last != '[' && last != '{') buf_puts(out, ",");
    json_append_text(v, l->flags, out);
    return reply_reserve(g, out);
}

void sse_add(const struct generation *g, json_t *v, struct buf *out) {
    buf_puts(out, "data: ");
    reply_serialize(g, v, JSON_REAL_PRECISION(9), out);
    buf_puts(out, "\n\n");
}

void ndjson_add(const struct generation *g, json_t *v, struct buf *out) {
    reply_serialize(g, v, JSON_REAL_PRECISION(9), out);
    buf_puts(out, "\n");
}

/* text of a completion */

/* Length of the suffix that is an incomplete character, or may begin a stop text or the tag before
 * a tool call. */
static size_t stop_holdback(const struct generation_spec *spec, const char *text, size_t n) {
    const struct strings *stops = &spec->stop_texts;
    size_t held = n - utf8_complete_len(text, n);
    if (spec->tool_choice != TOOL_CHOICE_NONE)
        held = MAX(held, tool_form_holdback(spec->tool_form, text, n));
    for (int i = 0; i < stops->n; i++) held = MAX(held, tag_partial_match(text, n, stops->v[i]));
    return held;
}

static void tokens_decode(const struct generation *g, struct completion *a, int32_t seen) {
    const int32_t *out = a->batch_request.request.out;
    const struct tokenizer *tok = g->s->model->tok;
    bool tools = g->spec.tool_choice != TOOL_CHOICE_NONE;
    const struct reasoning_form *form = g->spec.reasoning_begin ? g->s->reasoning_form : NULL;
    if (seen <= a->n_decoded) return;
    if (seen > a->ends_cap) {
        a->ends_cap = MAX(2 * a->ends_cap, seen);
        a->ends = xrealloc(a->ends, sizeof *a->ends * (size_t)a->ends_cap);
    }
    for (; a->n_decoded < seen; a->n_decoded++) {
        int32_t id = out[a->n_decoded];
        bool tag = tokenizer_is_special(tok, id) &&
                   ((tools && tool_form_has_token(g->spec.tool_form, tok, id)) ||
                    (form && reasoning_form_has_token(form, tok, id)));
        tokenizer_decode_token(tok, id, tag, &a->text);
        a->ends[a->n_decoded] = a->text.len;
    }
}

/* The number of tokens whose text ends at or before `end`, of which at least n are known. */
static int32_t tokens_until(const struct completion *a, int32_t n, size_t end) {
    while (n < a->n_decoded && a->ends[n] <= end) n++;
    return n;
}

/* reasoning */

void reasoning_expect(const struct server *s, struct generation_spec *spec, const char *continued) {
    const struct reasoning_form *f = s->reasoning_form;
    spec->reasoning_begin = REASONING_NONE;
    if (spec->grammar || !f) return;
    bool open = continued ? reasoning_form_is_open(f, continued)
                          : reasoning_form_opened_by(f, s->model->tok, spec->prompts);
    if (open)
        spec->reasoning_begin = REASONING_OPEN;
    else if (!continued) // reasoning only begins a turn
        spec->reasoning_begin = REASONING_BEFORE;
}

/* How the text [p, end) begins: not with the tag (NULL: no tag), with a part of it, or with all. */
enum tag_match { TAG_NONE, TAG_PARTIAL, TAG_WHOLE };
static enum tag_match tag_match(const char *p, const char *end, const char *tag) {
    size_t len = tag ? strlen(tag) : 0, n = MIN((size_t)(end - p), len);
    if (!tag || memcmp(p, tag, n) != 0) return TAG_NONE;
    return n == len ? TAG_WHOLE : TAG_PARTIAL;
}

/* Finds the opening tag, or the tag of an answer without reasoning. Until one of them is complete,
 * content_begin is the end of the white space. */
static void reasoning_open(const struct reasoning_form *f, struct completion *a) {
    const char *text = a->text.data, *end = text + a->shown,
               *p = skip_whitespace(text + a->content_begin, end);
    enum tag_match open = tag_match(p, end, f->open), answer = tag_match(p, end, f->answer_open);
    a->content_begin = (size_t)(p - text);
    if (open == TAG_WHOLE) {
        a->reasoning_state = REASONING_OPEN;
        a->content_begin += strlen(f->open);
    } else if (answer == TAG_WHOLE) {
        a->reasoning_state = REASONING_CLOSED;
    } else if ((open == TAG_NONE && answer == TAG_NONE) || a->done) {
        a->reasoning_state = REASONING_NONE;
        a->content_begin = a->sent = 0;
    }
}

/* Appends text to the reasoning, without newlines at its begin and end. */
static void reasoning_add(struct completion *a, const char *p, size_t n) {
    for (; n > 0; n--, p++) {
        if (*p == '\n') {
            a->n_newlines++;
            continue;
        }
        for (; a->n_newlines > 0; a->n_newlines--)
            if (a->reasoning.len) buf_puts(&a->reasoning, "\n");
        buf_add(&a->reasoning, p, 1);
    }
}

/* Moves content_begin to the end of the known reasoning, which may be after the closing tag. */
static void reasoning_read(const struct generation *g, struct completion *a) {
    const char *p = a->text.data + a->content_begin, *tag = g->s->reasoning_form->close;
    size_t left = a->shown - a->content_begin;
    const char *close = memmem(p, left, tag, strlen(tag));
    size_t held = a->done ? 0 : tag_partial_match(p, left, tag),
           n = close ? (size_t)(close - p) : left - held;
    if (g->spec.reasoning) reasoning_add(a, p, n);
    a->content_begin += n + (close ? strlen(tag) : 0);
    a->n_reasoning_tokens = tokens_until(a, a->n_reasoning_tokens, a->content_begin);
    if (close) a->reasoning_state = REASONING_CLOSED;
}

/* Moves content_begin past the newlines and the tag before the content. Returns whether the content
 * begins there, and not a part of that tag. */
static bool answer_open(const struct reasoning_form *f, struct completion *a) {
    const char *text = a->text.data, *end = text + a->shown, *p = text + a->content_begin;
    enum tag_match match = TAG_NONE;
    while (p < end && (*p == '\n' || (match = tag_match(p, end, f->answer_open)) == TAG_WHOLE))
        p += *p == '\n' ? 1 : strlen(f->answer_open);
    a->content_begin = (size_t)(p - text);
    return p == end || match != TAG_PARTIAL || a->done;
}

/* Separates the reasoning from the content. Returns whether the rest of `shown` is content, and not
 * reasoning or a part of a tag. */
static bool reasoning_parse(const struct generation *g, struct completion *a) {
    const struct reasoning_form *f = g->s->reasoning_form;
    bool content = true;
    if (a->reasoning_state == REASONING_BEFORE) reasoning_open(f, a);
    if (a->reasoning_state == REASONING_OPEN) reasoning_read(g, a);
    if (a->reasoning_state == REASONING_CLOSED) content = answer_open(f, a);
    a->sent = MAX(a->sent, a->content_begin);
    return content &&
           (a->reasoning_state == REASONING_NONE || a->reasoning_state == REASONING_CLOSED);
}

/* Leaves out the tag after the content. */
static void answer_close(const struct reasoning_form *f, struct completion *a) {
    size_t n = a->content_end - a->content_begin;
    if (a->reasoning_state == REASONING_CLOSED)
        a->content_end = a->content_begin +
                         reasoning_form_content_len(f, a->text.data + a->content_begin, n, a->done);
}

/* tool calls */

static struct tool_call *tool_call_at(const struct generation *g, struct completion *a, int i) {
    if (i == a->n_tool_calls) {
        if (a->n_tool_calls == a->tools_cap) {
            a->tools_cap = 2 * a->tools_cap + 1;
            a->tool_calls = xrealloc(a->tool_calls, sizeof *a->tool_calls * (size_t)a->tools_cap);
        }
        a->tool_calls[a->n_tool_calls++] = (struct tool_call){0};
        char id[40];
        server_new_id(g->s, "call_", id);
        memcpy(a->tool_calls[i].id, id, sizeof a->tool_calls[i].id - 1);
    }
    return &a->tool_calls[i];
}

/* Parses the calls between tags; content may precede and separate them. */
static void tool_calls_parse_tagged(const struct generation *g, struct completion *a) {
    const struct tool_form *f = g->spec.tool_form;
    const char *text = a->text.data, *end = text + a->shown, *call_begin, *call_end;
    const char *p = text + MIN(MAX(a->calls_end, a->content_begin), a->shown);
    const char *first = a->calls_begin ? NULL : tool_form_first(f, p, end);
    if (first) a->calls_begin = (size_t)(first - text) + 1;
    while (!(g->spec.single_tool_call && a->n_parsed_calls) &&
           (call_begin = tool_form_next(f, p, end, a->n_parsed_calls > 0))) {
        struct tool_call *call = tool_call_at(g, a, a->n_parsed_calls);
        if (!call->name) call->args = call->args_end = 0;
        if (!(call_end = tool_call_parse(f, text, call_begin, end, call))) break;
        if (call->name) a->n_parsed_calls++;
        p = call_end;
        a->calls_end = (size_t)(p - text);
    }
    if (a->calls_begin) a->content_end = a->calls_begin - 1;
    if (!a->done) return;
    int n = a->n_parsed_calls; // a truncated call with a name is counted too
    if (n < a->n_tool_calls && a->tool_calls[n].name) n++;
    a->n_tool_calls = n; // drops tags around text that is not a call
    if (n == 0) a->content_end = a->shown;
}

static bool is_offered_tool(const struct generation *g, const char *name) {
    const struct strings *v = &g->spec.tool_names;
    int i = 0;
    while (i < v->n && strcmp(v->v[i], name) != 0) i++;
    return i < v->n;
}

/* Parses a reply that is one JSON object without tags. It is a call if it names an offered tool,
 * which is known only at the end. Returns whether the reply is a call or may become one. */
static bool tool_call_parse_untagged(const struct generation *g, struct completion *a) {
    const char *text = a->text.data, *end = text + a->shown,
               *p = skip_whitespace(text + a->content_begin, end);
    if (p == end || *p != '{') return false;
    a->content_end = a->content_begin;
    if (!a->done) return true;
    struct tool_call c = {0};
    const char *object_end = tool_call_parse_json(text, p, end, &c);
    bool is_call = object_end && c.args_end && c.name && is_offered_tool(g, c.name);
    free(c.name);
    if (is_call)
        tool_call_parse_json(text, p, end, tool_call_at(g, a, 0));
    else
        a->content_end = a->shown;
    return is_call;
}

/* Parses a reply whose grammar is one call: no part of it is content. A call that the end of the
 * reply cuts off is dropped: its arguments are not valid. A stream may have sent its beginning.
 */
static void tool_call_parse_required(const struct generation *g, struct completion *a) {
    const char *text = a->text.data, *end = text + a->shown,
               *p = skip_whitespace(text + a->content_begin, end);
    struct tool_call c = {0};
    const char *object_end = tool_call_parse_json(text, p, end, &c);
    bool is_call = c.name && c.args && (!a->done || (object_end && c.args_end));
    free(c.name);
    a->content_end = a->content_begin;
    if (is_call)
        tool_call_parse_json(text, p, end, tool_call_at(g, a, 0));
    else
        while (a->n_tool_calls) free(a->tool_calls[--a->n_tool_calls].name);
}

/* Moves the output of an async worker, which consists of whole characters, to the completion. */
static void async_output_read(struct completion *a) {
    struct async_output *o = a->async;
    pthread_mutex_lock(&o->lock);
    buf_add(&a->text, o->content.data, o->content.len);
    buf_add(&a->reasoning, o->reasoning.data, o->reasoning.len);
    o->content.len = o->reasoning.len = 0;
    if (o->steps && !a->steps) a->steps = json_array();
    if (o->steps) json_array_extend(a->steps, o->steps);
    json_decref(o->steps);
    o->steps = NULL;
    if (o->run) a->run = o->run;
    o->run = NULL;
    a->done = o->done;
    pthread_mutex_unlock(&o->lock);
    a->shown = a->content_end = a->text.len;
}

void completion_advance(const struct generation *g, struct completion *a) {
    if (a->async) {
        async_output_read(a);
        return;
    }
    bool done = __atomic_load_n(&a->batch_request.done, __ATOMIC_ACQUIRE);
    int32_t seen = __atomic_load_n(&a->batch_request.n_visible, __ATOMIC_ACQUIRE);
    bool tools = g->spec.tool_choice != TOOL_CHOICE_NONE;
    if (a->done || (seen == a->n_decoded && !done)) return;
    tokens_decode(g, a, seen);
    a->shown = a->text.len;
    if (done && g->spec.stop_texts.n)
        a->shown = MIN(a->shown, a->batch_request.request.text.len);
    else if (!done && a->text.len)
        a->shown -= stop_holdback(&g->spec, a->text.data, a->text.len);
    a->done = done;
    a->content_end = a->shown;
    if (a->text.len == 0) return;
    if (!reasoning_parse(g, a))
        a->content_end = a->content_begin;
    else if (g->spec.tool_choice == TOOL_CHOICE_REQUIRED)
        tool_call_parse_required(g, a);
    else if (tools && !tool_call_parse_untagged(g, a))
        tool_calls_parse_tagged(g, a);
    answer_close(g->s->reasoning_form, a);
}

struct completion *reply_completion(const struct generation *g, int i) {
    return &g->completions[g->first + i];
}

int reply_index(const struct generation *g, const struct completion *a) {
    return a->index - g->first;
}

json_t *completion_content_json(const struct completion *a) {
    const char *text = a->text.data ? a->text.data + a->content_begin : "";
    return json_string_lossy(text, a->content_end - a->content_begin);
}

int32_t completion_tokens_kept(const struct completion *a) {
    int32_t n = 0;
    if (a->shown == a->text.len) return a->n_decoded;
    while (n < a->n_decoded && (n ? a->ends[n - 1] : 0) < a->shown) n++;
    return n;
}

int32_t completion_tokens_sent(const struct completion *a) {
    return a->done ? completion_tokens_kept(a) : tokens_until(a, a->tokens_sent, a->sent);
}

bool completion_was_cut(const struct completion *a) {
    enum finish_reason finish = a->batch_request.request.finish;
    return !a->async && (finish == FINISH_LENGTH || finish == FINISH_LOOP);
}

const char *completion_finish_reason(const struct completion *a) {
    if (!a->done) return NULL;
    if (a->async) return a->async->truncated ? "length" : "stop";
    bool cut = completion_was_cut(a);
    if (a->n_tool_calls && !(cut && a->tool_calls[a->n_tool_calls - 1].args_end == 0))
        return "tool_calls";
    return cut || a->batch_request.request.finish == FINISH_NONE ? "length" : "stop";
}

struct token_usage generation_usage(const struct generation *g) {
    struct token_usage u = {0};
    for (int i = 0; i < g->spec.n_prompts; i++) u.prompt += g->spec.prompts[i].n;
    u.prompt += g->spec.router_tokens;
    for (int i = 0; i < g->n_completions && g->completions[i].async; i++) {
        u.prompt += g->completions[i].async->usage.prompt;
        u.completion += g->completions[i].async->usage.completion;
        u.cached += g->completions[i].async->usage.cached;
    }
    for (int i = 0; i < g->n_completions; i++) {
        u.completion += g->completions[i].batch_request.request.n_generated;
        u.reasoning += g->completions[i].n_reasoning_tokens;
        if (g->completions[i].index % g->spec.n == 0)
            u.cached += g->completions[i].batch_request.request.n_cached;
    }
    if (g->spec.filter) {
        u.prompt += g->spec.filter->questioner.prefilled;
        u.completion += g->spec.filter->questioner.generated;
    }
    return u;
}

struct token_usage completion_usage(const struct completion *a) {
    const struct engine_request *r = &a->batch_request.request;
    struct token_usage u = {
        .prompt = r->n_prompt, .completion = r->n_generated, .cached = r->n_cached};
    if (!a->async) return u;
    pthread_mutex_lock(&a->async->lock);
    u = a->async->usage;
    pthread_mutex_unlock(&a->async->lock);
    return u;
}

/* creation and release */

void generation_spec_release(struct generation_spec *spec) {
    for (int i = 0; i < spec->n_prompts; i++) token_ids_release(&spec->prompts[i]);
    free(spec->prompts);
    free(spec->bias);
    strings_release(&spec->stop_texts);
    strings_release(&spec->tool_names);
    free(spec->user);
    json_decref(spec->request_json);
    json_decref(spec->router);
    json_decref(spec->extra);
    sample_filter_free(spec->filter);
    *spec = (struct generation_spec){0};
}

void completion_release(struct completion *a) {
    engine_request_release(&a->batch_request.request);
    for (int i = 0; i < a->n_tool_calls; i++) free(a->tool_calls[i].name);
    free(a->tool_calls);
    free(a->ends);
    buf_release(&a->text);
    buf_release(&a->chunk);
    buf_release(&a->reasoning);
    json_decref(a->steps);
    json_decref(a->run);
    if (a->async) {
        buf_release(&a->async->content);
        buf_release(&a->async->reasoning);
        json_decref(a->async->steps);
        json_decref(a->async->run);
        free(a->async);
    }
}

bool async_slot_acquire(struct server *s, struct exchange *x) {
    struct server *front = server_front(s);
    if (__atomic_add_fetch(&front->n_async_threads, 1, __ATOMIC_ACQUIRE) <= ASYNC_WORKERS_MAX)
        return true;
    async_slot_release(s);
    exchange_add_header(x, "Retry-After", "2");
    api_fail(x, 503, NULL, NULL, "overloaded",
             "%d teams, agents and checks are running already; try again later", ASYNC_WORKERS_MAX);
    return false;
}

void async_slot_release(struct server *s) {
    __atomic_sub_fetch(&server_front(s)->n_async_threads, 1, __ATOMIC_RELEASE);
}

static void generation_list_add(struct generation *g) {
    struct server *s = g->s;
    pthread_mutex_lock(&s->lock);
    g->next = s->generations;
    if (g->next) g->next->prev = g;
    s->generations = g;
    pthread_mutex_unlock(&s->lock);
}

static void generation_list_remove(struct generation *g) {
    struct server *s = g->s;
    pthread_mutex_lock(&s->lock);
    if (g->next) g->next->prev = g->prev;
    *(g->prev ? &g->prev->next : &s->generations) = g->next;
    pthread_mutex_unlock(&s->lock);
}

/* Adds the generation to the metrics, traces and the key's usage, once. Call it before the end of
 * the reply is sent, because the client may read them at once. */
static void generation_count(struct generation *g) {
    if (!g->counted) request_metrics_add_generation(g);
    g->counted = true;
}

static void generation_release(struct generation *g) {
    if (__atomic_sub_fetch(&g->refs, 1, __ATOMIC_ACQ_REL) > 0) return;
    struct server *front = server_front(g->s);
    bool has_slot = g->has_slot;
    generation_list_remove(g);
    if (g->n_unfinished == 0) generation_count(g);
    for (int i = 0; i < g->n_completions; i++) completion_release(&g->completions[i]);
    free(g->completions);
    if (g->spec.grammar) server_grammar_release(g->s, g->spec.grammar);
    generation_spec_release(&g->spec);
    model_ref_release(&g->target);
    memory_budget_release(g->s->memory, g);
    exchange_release(g->x);
    base_release(g->s, true);
    free(g->key);
    free(g->room);
    free(g);
    if (has_slot) async_slot_release(front); // the server waits for it, so it is the last step
}

static void generation_cancel(void *ctx) {
    struct generation *g = ctx;
    __atomic_store_n(&g->cancelled, true, __ATOMIC_RELEASE);
    for (int i = 0; i < g->n_completions; i++) {
        struct completion *a = &g->completions[i];
        if (a->async)
            __atomic_store_n(&a->async->stop, true, __ATOMIC_RELEASE);
        else
            batcher_cancel(g->s->batcher, &a->batch_request);
    }
}

/* replies */

/* Whether an async worker failed; sets err. */
static bool async_failed(const struct generation *g, struct error *err) {
    bool failed = false;
    for (int i = 0; i < g->n_completions && !failed; i++) {
        struct async_output *o = g->completions[i].async;
        if (!o) return false;
        pthread_mutex_lock(&o->lock);
        failed = o->error.code != OK;
        if (failed) *err = o->error;
        pthread_mutex_unlock(&o->lock);
    }
    return failed;
}

/* Whether the reply cannot be written, because memory is missing, nodes do not agree or its worker
 * failed; sets err. */
static bool reply_failed(const struct generation *g, struct error *err) {
    bool failed = g->room->refused, differs = false;
    for (int i = 0; i < g->n_completions && !failed && !g->completions[i].async; i++) {
        const struct batcher_request *c = &g->completions[i].batch_request;
        bool done = __atomic_load_n(&c->done, __ATOMIC_ACQUIRE);
        failed = done && c->no_memory;
        differs |= done && c->no_result;
    }
    if (failed) error_set(err, ERR_STATE, "the server is short of memory; try again later");
    if (!failed && differs)
        return error_set(err, ERR_STATE,
                         "the nodes do not agree on the tokens of this reply; try again") != OK;
    if (!failed && async_failed(g, err)) return true;
    if (failed || !g->spec.filter || g->spec.filter->error.code == OK) return failed;
    *err = g->spec.filter->error;
    return true;
}

json_t *reply_extension(json_t *reply) {
    json_t *extension = json_object_get(reply, "shoal");
    if (!extension) json_object_set_new(reply, "shoal", extension = json_object());
    return extension;
}

void router_report_add(const struct generation *g, json_t *reply) {
    if (g->spec.router) json_object_set(reply_extension(reply), "router", g->spec.router);
}

/* Replaces the output after `from` by an error event. */
static enum stream_status stream_fail(struct generation *g, size_t from, const struct error *err,
                                      struct buf *out) {
    bool events = strcmp(g->dialect->stream_type, "text/event-stream") == 0;
    out->len = from;
    (events ? sse_add : ndjson_add)(NULL, api_error_json(err, !events), out);
    generation_cancel(g);
    return STREAM_END;
}

/* Logs the reply for ratings. Call it before the reply is sent, because the client may rate the
 * reply at once. */
static void reply_log(const struct generation *g) {
    const struct completion *a = reply_completion(g, 0);
    const char *text = a->text.data ? a->text.data + a->content_begin : NULL;
    size_t n = a->content_end - a->content_begin;
    feedback_log_reply(server_front(g->s)->ab,
                       &(struct feedback_reply){.id = g->id,
                                                .model = g->target.name,
                                                .key = g->key,
                                                .prompt = g->spec.request_json,
                                                .text = text,
                                                .text_len = n,
                                                .arm = &g->arm,
                                                .created = g->created});
}

/* Whether a completion has a token or another part of its reply. */
static bool completion_has_begun(const struct completion *a) {
    struct async_output *o = a->async;
    if (!o)
        return __atomic_load_n(&a->batch_request.n_visible, __ATOMIC_ACQUIRE) > 0 ||
               __atomic_load_n(&a->batch_request.done, __ATOMIC_ACQUIRE);
    pthread_mutex_lock(&o->lock);
    bool begun = o->content.len || o->reasoning.len || o->steps || o->done;
    pthread_mutex_unlock(&o->lock);
    return begun;
}

/* The stream of a call sends nothing before the first token, because another link of a fallback
 * chain can take over until then. */
static enum stream_status stream_pull(void *ctx, struct buf *out) {
    struct generation *g = ctx;
    struct error err;
    size_t from = out->len;
    int finished = 0;
    if (g->spec.filter && !__atomic_load_n(&g->selected, __ATOMIC_ACQUIRE)) return STREAM_WAIT;
    if (reply_failed(g, &err)) return stream_fail(g, from, &err, out);
    for (int i = 0; i < g->n_choices; i++) {
        struct completion *a = reply_completion(g, i);
        if (!a->role_sent && exchange_parent(g->x) && !completion_has_begun(a)) continue;
        if (!a->role_sent && g->dialect->begin) g->dialect->begin(g, a, out);
        a->role_sent = true;
        completion_advance(g, a);
        g->dialect->delta(g, a, out);
        if (a->done && !a->finished) {
            g->dialect->finish(g, a, out);
            a->finished = true;
        }
        finished += a->finished;
    }
    if (reply_failed(g, &err)) return stream_fail(g, from, &err, out);
    if (finished < g->n_choices) return out->len ? STREAM_MORE : STREAM_WAIT;
    reply_log(g);
    generation_count(g);
    g->dialect->end(g, out);
    return STREAM_END;
}

static void stream_close(void *ctx, bool finished) {
    struct generation *g = ctx;
    if (!finished) generation_cancel(g);
    generation_release(g);
}

/* The exchange takes over the text and the memory reserved for it. */
static void reply_send_text(struct generation *g, struct buf *text) {
    memory_budget_transfer(g->s->memory, g, g->x, text->len);
    exchange_reply_buf(g->x, 200, "application/json", text);
}

static void reply_send(void *ctx) {
    struct generation *g = ctx;
    struct buf text = {0};
    struct error err;
    bool failed = reply_failed(g, &err);
    for (int i = 0; i < g->n_completions && !failed; i++) completion_advance(g, &g->completions[i]);
    if (!failed) {
        reply_serialize(g, g->dialect->write_reply(g), JSON_REAL_PRECISION(17), &text);
        failed = reply_failed(g, &err);
    }
    if (failed) {
        buf_release(&text);
        api_fail_error(g->x, &err, NULL);
    } else {
        reply_log(g);
        generation_count(g);
        reply_send_text(g, &text);
    }
    generation_release(g);
}

static void reply_send_in_worker(void *ctx) {
    struct http *h = ((struct generation *)ctx)->s->http;
    reply_send(ctx);
    http_resume_postponed(h); // the generation may have released adapters
}

/* selection among samples */

static void sample_select(struct generation *g) {
    const int n = g->n_completions;
    struct error err;
    char **texts = xcalloc((size_t)n, sizeof *texts);
    for (int i = 0; i < n; i++) {
        struct completion *a = &g->completions[i];
        completion_advance(g, a);
        texts[i] = xstrndup(a->text.data ? a->text.data + a->content_begin : "",
                            a->content_end - a->content_begin);
    }
    if (!__atomic_load_n(&g->cancelled, __ATOMIC_ACQUIRE) && !reply_failed(g, &err))
        g->first = sample_filter_select(g->spec.filter, texts, n, &g->cancelled);
    for (int i = 0; i < n; i++) free(texts[i]);
    free(texts);
    __atomic_store_n(&g->selected, true, __ATOMIC_RELEASE);
}

/* Takes over the exchange's reference without a stream, and one more with a stream. */
static void selection_run(void *ctx) {
    struct generation *g = ctx;
    sample_select(g);
    if (!g->spec.stream) {
        http_run_in_worker(g->s->http, reply_send_in_worker, g);
        return;
    }
    exchange_wake(g->x);
    generation_release(g);
}

static void *selection_thread(void *ctx) {
    selection_run(ctx);
    return NULL;
}

static void selection_start(struct generation *g) {
    pthread_t thread;
    if (g->spec.stream) __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED);
    if (pthread_create(&thread, NULL, selection_thread, g) == 0)
        pthread_detach(thread);
    else // without memory for a thread a worker waits for the check
        http_run_in_worker(g->s->http, selection_run, g);
}

/* on_change of the batcher's requests. Usually runs in the batcher's thread, see batcher.h. */
static void request_progress(struct batcher_request *c, bool done) {
    struct generation *g = c->user;
    if (g->spec.stream && !g->spec.filter) exchange_wake(g->x);
    if (!done) return;
    bool last = __atomic_sub_fetch(&g->n_unfinished, 1, __ATOMIC_ACQ_REL) == 0;
    if (last && g->spec.filter)
        selection_start(g);
    else if (last && !g->spec.stream)
        http_run_in_worker(g->s->http, reply_send_in_worker, g);
    generation_release(g);
}

/* start of a generation */

static int32_t context_length(const struct server *s, const struct generation_spec *spec) {
    int32_t most = engine_max_len(s->engine);
    return spec->context ? MIN(spec->context, most) : most;
}

/* A reply that shifts its context could otherwise be endless; Ollama has the same limit. */
enum { SHIFT_CONTEXTS = 10 };

int32_t reply_max_tokens(const struct server *s, const struct generation_spec *spec,
                         int32_t n_prompt) {
    int64_t context = context_length(s, spec),
            room = (spec->context_shift ? SHIFT_CONTEXTS * context : context) - n_prompt;
    return (int32_t)MIN(spec->max_tokens, room);
}

/* The tokens of the prompt that a context shift keeps. The room after them, at least a few tokens,
 * is what the model sees of its reply. */
static int32_t kept_tokens(const struct server *s, const struct generation_spec *spec,
                           const struct token_ids *prompt) {
    enum { ROOM_MIN = 4 };
    bool bos = prompt->n && prompt->v[0] == tokenizer_bos(s->model->tok);
    int64_t n = spec->n_keep < 0 ? prompt->n : (int64_t)spec->n_keep + bos;
    return (int32_t)MIN(MIN(n, prompt->n), MAX(context_length(s, spec) - ROOM_MIN, 0));
}

static void engine_request_init(struct generation *g, struct completion *a) {
    struct generation_spec *spec = &g->spec;
    struct engine_request *r = &a->batch_request.request;
    const struct token_ids *prompt = &spec->prompts[a->prompt];
    *r = (struct engine_request){.prompt = prompt->v,
                                 .n_prompt = prompt->n,
                                 .sampling = spec->sampling,
                                 .max_tokens = reply_max_tokens(g->s, spec, prompt->n),
                                 .loop_tokens = spec->loop_tokens,
                                 .stop = spec->stop_ids,
                                 .n_stop = spec->n_stop_ids,
                                 .stop_texts = (const char *const *)spec->stop_texts.v,
                                 .n_stop_texts = spec->stop_texts.n,
                                 .grammar = spec->grammar,
                                 .n_top = MAX(spec->n_top, spec->n_prompt_top),
                                 .prompt_logprobs = spec->prompt_logprobs};
    r->sampling.seed += (uint64_t)(a->index % spec->n);
    r->sampling.bias = spec->bias;
    int32_t context = context_length(g->s, spec);
    if (spec->context_shift && r->max_tokens > context - prompt->n) {
        r->context_len = context;
        r->n_keep = kept_tokens(g->s, spec, prompt);
    }
    model_ref_apply(&g->target, r);
    a->batch_request.client = g->key ? hash_fnv1a(g->key, strlen(g->key)) : 0;
    a->batch_request.on_change = request_progress;
    a->batch_request.user = g;
}

static struct generation *generation_new(struct server *s, struct exchange *x,
                                         const struct api_dialect *d, const char *id_prefix,
                                         struct model_ref *t, struct generation_spec *spec) {
    struct generation *g = xcalloc(1, sizeof *g);
    int n = spec->n_prompts * spec->n;
    *g = (struct generation){.refs = 1 + n,
                             .n_unfinished = n,
                             .s = s,
                             .x = exchange_retain(x),
                             .dialect = d,
                             .target = *t,
                             .spec = *spec,
                             .created = (int64_t)time(NULL),
                             .started_at = exchange_start_time(x),
                             .n_completions = n,
                             .n_choices = spec->filter ? 1 : n};
    server_new_id(s, id_prefix, g->id);
    system_fingerprint(s, &g->target, g->fingerprint);
    CHECK(getrandom(&g->nonce, sizeof g->nonce, 0) == sizeof g->nonce);
    g->room = xcalloc(1, sizeof *g->room);
    memory_budget_transfer(s->memory, x, g, SIZE_MAX);
    g->room->bytes = memory_budget_reserved(s->memory, g);
    g->completions = xcalloc((size_t)n, sizeof *g->completions);
    for (int i = 0; i < n; i++) {
        g->completions[i].index = i;
        g->completions[i].prompt = i / spec->n;
        g->completions[i].reasoning_state = spec->reasoning_begin;
    }
    if (exchange_key_id(x)) g->key = xstrdup(exchange_key_id(x));
    *t = (struct model_ref){0};
    *spec = (struct generation_spec){0};
    exchange_add_header(x, "X-Shoal-Reply", g->id); // for dialects without a field for the id
    CHECK(base_retain(s));                          // the handler has a reference
    generation_list_add(g);
    return g;
}

/* The field that sets the number of completions. */
static const char *count_field(const struct generation_spec *spec) {
    return spec->filter ? "samples" : "n";
}

/* A request with more completions than the queue is long would get 503 on every retry, so it is
 * refused with 400. */
static int reply_count_check(const struct server *s, const struct generation_spec *spec,
                             struct error *err) {
    int64_t n = (int64_t)spec->n_prompts * spec->n;
    if (n <= s->options->max_waiting) return OK;
    return error_set(err, ERR_USAGE,
                     "%d prompts with '%s' = %d are %lld replies, and this server takes %lld at "
                     "once; send fewer in a request",
                     spec->n_prompts, count_field(spec), spec->n, (long long)n,
                     (long long)s->options->max_waiting);
}

/* Removes tokens at the beginning of long prompts, see truncate_prompt_tokens. */
static void prompts_truncate(const struct server *s, struct generation_spec *spec) {
    int32_t most = spec->truncate_prompt_tokens, context = context_length(s, spec);
    if (most < 0) most = context - MIN(spec->max_tokens, context / 2);
    for (int i = 0; most && i < spec->n_prompts; i++) {
        struct token_ids *p = &spec->prompts[i];
        if (p->n <= most) continue;
        int32_t kept = p->v[0] == tokenizer_bos(s->model->tok);
        memmove(p->v + kept, p->v + p->n - most + kept, (size_t)(most - kept) * sizeof *p->v);
        p->n = most;
    }
}

static int prompt_too_long(const struct server *s, int32_t context, int32_t n, struct error *err) {
    int32_t of_server = engine_max_len(s->engine), of_model = s->model->config.max_seq_len;
    if (context < of_server)
        return error_set(err, ERR_USAGE,
                         "this request's context is %d tokens (the server's: %d), and the prompt "
                         "alone has %d; shorten it",
                         context, of_server, n);
    if (of_server < of_model)
        return error_set(err, ERR_USAGE,
                         "this server's context is %d tokens (the model's: %d, with 'shoal serve "
                         "--max-model-len'), and the prompt alone has %d; shorten it",
                         of_server, of_model, n);
    return error_set(err, ERR_USAGE,
                     "this model's context is %d tokens, and the prompt alone has %d; shorten it",
                     of_model, n);
}

static int prompts_check(const struct server *s, const struct generation_spec *spec,
                         struct error *err) {
    int32_t most = context_length(s, spec);
    for (int i = 0; i < spec->n_prompts; i++)
        if (spec->prompts[i].n + (spec->max_tokens > 0) > most)
            return prompt_too_long(s, most, spec->prompts[i].n, err);
    return OK;
}

bool prompt_fits(const struct server *s, const struct generation_spec *spec) {
    struct error err;
    return prompts_check(s, spec, &err) == OK;
}

static void generation_args_release(struct server *s, struct model_ref *t,
                                    struct generation_spec *spec) {
    if (spec->grammar) server_grammar_release(s, spec->grammar);
    generation_spec_release(spec);
    model_ref_release(t);
}

void generation_fail(struct server *s, struct exchange *x, struct model_ref *t,
                     struct generation_spec *spec, const struct error *err) {
    api_fail_error(x, err, spec->bad_field);
    generation_args_release(s, t, spec);
}

/* If an A/B test runs on the target's adapter, replaces the adapter by the assigned one and names
 * it in a header. */
static struct ab_arm ab_variant_assign(struct server *s, struct exchange *x, struct model_ref *t,
                                       const char *user) {
    struct ab_arm arm = {0};
    char *name, header[AB_NAME_LEN + 2];
    if (!s->ab || t->n != 1 || t->terms[0].weight != 1.0f) return arm;
    struct adapter *a = ab_assign(s->ab, t->label, user, &arm, &name);
    if (!a) return arm;
    adapter_release(t->terms[0].adapter);
    t->terms[0].adapter = a;
    free(t->label);
    t->label = name;
    snprintf(header, sizeof header, "%s/%c", arm.name, "ab"[arm.side]);
    exchange_add_header(x, "X-Shoal-AB", header);
    return arm;
}

void generation_start(struct server *s, struct exchange *x, const struct api_dialect *d,
                      const char *id_prefix, struct model_ref *t, struct generation_spec *spec) {
    struct error err;
    const char *what = NULL;
    if (fallback_generation_start(s, x, d, id_prefix, t, spec)) return;
    prompts_truncate(s, spec);
    bool many = reply_count_check(s, spec, &err) != OK;
    if (many || prompts_check(s, spec, &err) != OK) {
        const char *prompt = strstr(exchange_path(x), "chat") ? "messages" : "prompt";
        api_fail(x, 400, NULL, many ? count_field(spec) : prompt,
                 many ? "invalid_value" : "context_length_exceeded", "%s", err.text);
        generation_args_release(s, t, spec);
        return;
    }
    if (generation_reserve(s, x, spec, &what, &err) != OK) {
        api_fail_error(x, &err, what);
        generation_args_release(s, t, spec);
        return;
    }
    if (t->is_auto) {
        auto_model_start(s, x, d, id_prefix, t, spec);
        return;
    }
    if (spec->filter && !async_slot_acquire(s, x)) {
        generation_args_release(s, t, spec);
        return;
    }
    struct ab_arm arm = ab_variant_assign(s, x, t, spec->user);
    struct generation *g = generation_new(s, x, d, id_prefix, t, spec);
    g->arm = arm;
    g->has_slot = g->spec.filter != NULL;
    struct batcher_request **calls = xcalloc((size_t)g->n_completions, sizeof *calls);
    for (int i = 0; i < g->n_completions; i++) {
        engine_request_init(g, &g->completions[i]);
        calls[i] = &g->completions[i].batch_request;
    }
    __atomic_add_fetch(&g->refs, 1, __ATOMIC_RELAXED); // held until the end of this function
    int rc = batcher_submit_all(s->batcher, calls, g->n_completions, &err);
    free(calls);
    if (rc != OK) {
        api_fail_error(x, &err, NULL);
        g->refs = 1;
    } else if (g->spec.stream) {
        struct stream_source source = {stream_pull, stream_close, g, d->keepalive};
        exchange_stream(x, 200, d->stream_type, &source);
    } else {
        exchange_on_disconnect(x, generation_cancel, g);
    }
    generation_release(g);
}

/* generations of async workers */

void generation_append(struct generation *g, struct completion *a, const struct async_part *part) {
    struct async_output *o = a->async;
    bool reasoning = g->spec.reasoning;
    pthread_mutex_lock(&o->lock);
    buf_puts(&o->content, part->content ? part->content : "");
    if (reasoning && part->reasoning) buf_puts(&o->reasoning, part->reasoning);
    if (reasoning && part->step && !o->steps) o->steps = json_array();
    if (reasoning && part->step)
        json_array_append_new(o->steps, part->step);
    else
        json_decref(part->step);
    if (part->run) o->run = part->run;
    if (part->usage) o->usage = *part->usage;
    if (part->error) o->error = *part->error;
    o->truncated = part->truncated;
    o->done = part->done;
    pthread_mutex_unlock(&o->lock);
    if (g->spec.stream) exchange_wake(g->x);
}

struct async_worker {
    struct generation *g;
    void (*fn)(struct generation *g, void *ctx);
    void *ctx;
};

static void *async_worker_thread(void *ctx) {
    struct async_worker *o = ctx;
    struct generation *g = o->g;
    struct server *s = g->s;
    o->fn(g, o->ctx);
    if (g->spec.stream)
        generation_release(g);
    else
        reply_send(g);
    async_slot_release(s);
    free(o);
    return NULL;
}

bool generation_start_async(struct server *s, struct exchange *x, const struct api_dialect *d,
                            const char *id_prefix, struct model_ref *t,
                            struct generation_spec *spec,
                            void (*fn)(struct generation *g, void *ctx), void *ctx) {
    pthread_t thread;
    struct error err;
    if (request_memory_reserve(s, x, (size_t)spec->n * TRANSCRIPT_BYTES, &err) != OK) {
        api_fail_error(x, &err, "n");
        generation_args_release(s, t, spec);
        return false;
    }
    if (!async_slot_acquire(s, x)) {
        generation_args_release(s, t, spec);
        return false;
    }
    struct generation *g = generation_new(s, x, d, id_prefix, t, spec);
    struct async_worker *o = xcalloc(1, sizeof *o);
    *o = (struct async_worker){g, fn, ctx};
    g->refs = g->spec.stream ? 2 : 1; // one is held by the thread, one by the stream
    g->n_unfinished = 0;
    for (int i = 0; i < g->n_completions; i++) {
        g->completions[i].async = xcalloc(1, sizeof *g->completions[i].async);
        pthread_mutex_init(&g->completions[i].async->lock, NULL);
    }
    if (g->spec.stream) {
        struct stream_source source = {stream_pull, stream_close, g, d->keepalive};
        exchange_stream(x, 200, d->stream_type, &source);
    } else {
        exchange_on_disconnect(x, generation_cancel, g);
    }
    CHECK(pthread_create(&thread, NULL, async_worker_thread, o) == 0);
    pthread_detach(thread);
    return true;
}
