/*
 * chat: conversations as tokens, with a mask of the tokens that the assistant writes.
 *
 * If a model has a chat template, the template's output is encoded. A model without a template, or
 * with the template that Shoal's writers put into files, uses ChatML. In both cases the content of
 * a message is never encoded as a special token. Text is always split where the assistant's part
 * begins and ends, as in generation, so that the tokens of a conversation are a prefix of the
 * tokens of its continuation.
 *
 * In ChatML the header of a turn, its content and its end are encoded separately. A template's
 * output is split at the special tokens in the template's own text, and where the assistant's part
 * begins and ends; the text between two such places is encoded as a whole.
 *
 * Invariant: with a mask, every added token has one byte, which is 1 exactly for the assistant's
 * part: in ChatML the content and the end of its turns, in a template the turns without the header.
 */
#define _GNU_SOURCE
#include "template/template.h"

#include <stdlib.h>
#include <string.h>

const char chatml_template[] =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/* tokens */

struct chat_encoding {
    const struct tokenizer *t;
    struct token_ids *out;
    struct buf *mask;
    struct buf pending;  /* text of a template since its last special token */
    bool continues_text; /* the next text continues a text, so no space is added before it */
    bool is_assistant;   /* the mask of the next tokens */
};

static void mask_append(struct chat_encoding *e, int from) {
    char byte = e->is_assistant ? 1 : 0;
    for (int i = from; e->mask && i < e->out->n; i++) buf_add(e->mask, &byte, 1);
}

static void encode_text(struct chat_encoding *e, const char *text, size_t len) {
    int from = e->out->n;
    tokenizer_encode(e->t, text, len, e->continues_text ? TOKENIZER_NO_PREFIX_SPACE : 0, e->out);
    e->continues_text |= len > 0;
    mask_append(e, from);
}

static void add_special(struct chat_encoding *e, int32_t id) {
    token_ids_add(e->out, id);
    e->continues_text = tokenizer_adds_space_once(e->t);
    mask_append(e, e->out->n - 1);
}

/* ChatML */

static int32_t special_token_find(const struct tokenizer *t, const char *piece) {
    int32_t id = tokenizer_piece_to_id(t, piece);
    return tokenizer_is_special(t, id) ? id : -1;
}

/* Adds a marker as its token, or as plain text if the tokenizer lacks it. */
static void add_marker(struct chat_encoding *e, int32_t id, const char *text) {
    if (id < 0)
        encode_text(e, text, strlen(text));
    else
        add_special(e, id);
}

static void add_header(struct chat_encoding *e, int32_t begin, const char *role) {
    add_marker(e, begin, "<|im_start|>");
    struct buf b = {0};
    buf_printf(&b, "%s\n", role);
    encode_text(e, b.data, b.len);
    buf_release(&b);
}

/* Adds BOS, if the model uses one, when `out` is empty. */
static void chatml_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                          bool generation_prompt, struct token_ids *out, struct buf *mask) {
    struct chat_encoding e = {.t = t, .out = out, .mask = mask};
    int32_t begin = special_token_find(t, "<|im_start|>"),
            end = special_token_find(t, "<|im_end|>");
    if (begin < 0 || end < 0) begin = end = -1;
    if (out->n == 0 && tokenizer_add_bos(t)) {
        token_ids_add(out, tokenizer_bos(t));
        mask_append(&e, 0);
    }
    for (int i = 0; i < n; i++) {
        add_header(&e, begin, msgs[i].role);
        e.is_assistant = strcmp(msgs[i].role, "assistant") == 0;
        encode_text(&e, msgs[i].content, strlen(msgs[i].content));
        add_marker(&e, end, "<|im_end|>");
        e.is_assistant = false;
        encode_text(&e, "\n", 1);
    }
    if (generation_prompt) add_header(&e, begin, "assistant");
}

/* templates */

struct chat_template {
    struct jinja *jinja; /* NULL: `parse_error` has the reason */
    struct error parse_error;
    json_t *tokens; /* bos_token … as transformers passes them */
    int64_t now;    /* SOURCE_DATE_EPOCH, or -1: by default a prompt does not depend on the clock */
    int32_t eot;    /* the special token that closes the assistant's turn, or -1 */
};

static void token_set(json_t *tokens, const struct tokenizer *t, const char *name, int32_t id) {
    int len;
    if (id < 0 || id >= tokenizer_vocab_size(t)) return;
    const char *piece = tokenizer_id_to_piece(t, id, &len);
    json_t *v = json_stringn(piece, (size_t)len);
    if (v) json_object_set_new(tokens, name, v);
}

static int64_t source_date(void) {
    const char *text = getenv("SOURCE_DATE_EPOCH");
    char *end = NULL;
    long long seconds = text && *text ? strtoll(text, &end, 10) : -1;
    return end && !*end && seconds >= 0 && seconds < (long long)1 << 40 ? seconds : -1;
}

static json_t *messages_json(const struct chat_message *msgs, int n, struct error *err) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        json_t *m = json_pack("{s:s,s:s}", "role", msgs[i].role, "content", msgs[i].content);
        if (m) {
            json_array_append_new(list, m);
            continue;
        }
        error_set(err, ERR_FORMAT, "message %d is not UTF-8", i + 1);
        json_decref(list);
        return NULL;
    }
    return list;
}

/* The last token of the assistant's part of a short conversation, if it is special; else -1. */
static int32_t find_turn_end_token(const struct tokenizer *t) {
    const struct chat_message msgs[] = {{"user", "x"}, {"assistant", "y"}};
    struct token_ids ids = {0};
    struct buf mask = {0};
    struct error err;
    int32_t end = -1;
    if (chat_encode(t, msgs, 2, false, &ids, &mask, &err) == OK)
        for (int i = 0; i < ids.n; i++)
            if (mask.data[i]) end = ids.v[i];
    token_ids_release(&ids);
    buf_release(&mask);
    return tokenizer_is_special(t, end) ? end : -1;
}

static struct chat_template *chat_template_new(const struct tokenizer *t, const char *text) {
    struct chat_template *c = xcalloc(1, sizeof *c);
    c->jinja = jinja_parse(text, strlen(text), &c->parse_error);
    c->tokens = json_object();
    c->now = source_date();
    token_set(c->tokens, t, "bos_token", tokenizer_bos(t));
    token_set(c->tokens, t, "eos_token", tokenizer_eos(t));
    token_set(c->tokens, t, "unk_token", tokenizer_get_spec(t)->unk);
    c->eot = -1;
    return c;
}

static void chat_template_free(struct chat_template *c) {
    if (!c) return;
    jinja_free(c->jinja);
    json_decref(c->tokens);
    free(c);
}

void tokenizer_set_chat_template(struct tokenizer *t, const char *text) {
    bool custom = text && strcmp(text, chatml_template) != 0;
    struct chat_template *c = custom ? chat_template_new(t, text) : NULL;
    tokenizer_attach_template(t, c, chat_template_free);
    if (c && c->jinja) c->eot = find_turn_end_token(t);
}

int32_t tokenizer_eot(const struct tokenizer *t) {
    const struct chat_template *c = tokenizer_get_template(t);
    if (c && c->eot >= 0) return c->eot;
    int32_t end = tokenizer_piece_to_id(t, "<|im_end|>");
    return end >= 0 ? end : tokenizer_eos(t);
}

/* One conversation with one template. It is rendered up to five times, and all renderings share one
 * budget. */
struct rendering {
    const struct chat_template *c;
    const struct chat_template_input *chat;
    uint64_t steps, max_steps; /* used so far, and the limit */
};
/* Budget for a template that is part of a request: about 0.1 s. Published templates take 300 steps
 * per message. */
enum { REQUEST_TEMPLATE_STEPS = 5000000 };

/* Renders the first n messages. */
static int render_messages(struct rendering *r, size_t n, bool prompt, struct jinja_output *out,
                           struct error *err) {
    const struct chat_template *c = r->c;
    const struct chat_template_input *chat = r->chat;
    if (!c->jinja) {
        *err = c->parse_error;
        *out = (struct jinja_output){0};
        return error_wrap(err, "chat template");
    }
    json_t *vars = chat->extra ? json_copy((json_t *)(uintptr_t)chat->extra) : json_object();
    json_t *messages = json_array();
    for (size_t i = 0; i < n; i++) json_array_append(messages, json_array_get(chat->messages, i));
    json_object_set_new(vars, "messages", messages);
    json_object_set(vars, "tools", chat->tools ? (json_t *)(uintptr_t)chat->tools : json_null());
    if (!json_object_get(vars, "documents")) json_object_set_new(vars, "documents", json_null());
    json_object_set_new(vars, "add_generation_prompt", json_boolean(prompt));
    struct jinja_input in = {.vars = vars,
                             .trusted = c->tokens,
                             .now = c->now,
                             .max_steps = r->max_steps,
                             .steps_used = r->steps,
                             .stop = chat->stop,
                             .stop_ctx = chat->stop_ctx};
    int rc = jinja_render(c->jinja, &in, out, err);
    r->steps += out->steps;
    json_decref(vars);
    return rc ? error_wrap(err, "chat template") : OK;
}

/* the assistant's turns */

static bool is_assistant(const struct chat_template_input *chat, int message) {
    const json_t *m = message < 0 ? NULL : json_array_get(chat->messages, (size_t)message);
    const char *role = json_string_value(json_object_get(m, "role"));
    return role && strcmp(role, "assistant") == 0;
}

/* Appends to `header` the text that add_generation_prompt adds to the output for the first n
 * messages. Most templates append the text; some replace the end of the output by it. */
static int generation_header_render(struct rendering *r, size_t n, struct buf *header,
                                    struct error *err) {
    struct jinja_output with_prompt, without_prompt = {0};
    int rc = render_messages(r, n, true, &with_prompt, err);
    if (rc == OK) rc = render_messages(r, n, false, &without_prompt, err);
    if (rc == OK) {
        size_t begin = with_prompt.n;
        bool is_appended = with_prompt.n >= without_prompt.n &&
                           memcmp(with_prompt.text, without_prompt.text, without_prompt.n) == 0;
        if (is_appended)
            begin = without_prompt.n;
        else if (with_prompt.n_message_ranges &&
                 with_prompt.message_ranges[with_prompt.n_message_ranges - 1].message < 0)
            begin = with_prompt.message_ranges[with_prompt.n_message_ranges - 1].begin;
        /* sets header->data even for "" */
        buf_add(header, with_prompt.text + begin, with_prompt.n - begin);
    }
    jinja_output_release(&with_prompt);
    jinja_output_release(&without_prompt);
    return rc;
}

/* Finds the header of the assistant's turns, which is the generation prompt. It is rendered after
 * the messages that precede the assistant's first turn, or, if that fails, after the whole
 * conversation. The header stays empty if both fail. Returns an error only if rendering was stopped
 * or has no steps left. */
static int generation_header_find(struct rendering *r, struct buf *header, struct error *err) {
    size_t n = json_array_size(r->chat->messages), first = 0;
    while (first < n && !is_assistant(r->chat, (int)first)) first++;
    int rc = first > 0 ? generation_header_render(r, first, header, err) : ERR_FORMAT;
    if (rc != OK && rc != ERR_STATE) rc = generation_header_render(r, n, header, err);
    return rc == ERR_STATE || (rc != OK && r->steps >= r->max_steps) ? rc : OK;
}

/* Sets the mask of a turn to 1, except for its header and the white space after its end. */
static void turn_mask_set(const struct jinja_output *o, const struct buf *header, size_t begin,
                          size_t end, uint8_t *mask) {
    size_t content_begin = begin, n_header = 0;
    while (content_begin < end && !o->origins[content_begin]) content_begin++;
    const char *found =
        header->len ? memmem(o->text + begin, content_begin - begin, header->data, header->len)
                    : NULL;
    if (found) begin = (size_t)(found - o->text);
    while (begin + n_header < content_begin && n_header < header->len &&
           o->text[begin + n_header] == header->data[n_header])
        n_header++;
    while (end > begin + n_header && !o->origins[end - 1] && strchr(" \t\r\n", o->text[end - 1]))
        end--;
    memset(mask + begin + n_header, 1, end - begin - n_header);
}

/* Sets mask[i] for the bytes of the assistant's part (see struct chat_span). */
static int assistant_mask_compute(struct rendering *r, const struct jinja_output *o, uint8_t *mask,
                                  struct error *err) {
    bool generated = false, header_searched = false;
    int rc = OK;
    struct buf header = {0};
    for (size_t i = 0; i < o->n; i++) {
        mask[i] = (o->origins[i] & JINJA_GENERATED) != 0;
        generated |= mask[i];
    }
    for (size_t k = 0; rc == OK && !generated && k < o->n_message_ranges; k++) {
        size_t begin = o->message_ranges[k].begin,
               end = k + 1 < o->n_message_ranges ? o->message_ranges[k + 1].begin : o->n;
        bool is_turn = is_assistant(r->chat, o->message_ranges[k].message);
        if (is_turn && !header_searched) rc = generation_header_find(r, &header, err);
        header_searched |= is_turn;
        if (is_turn) turn_mask_set(o, &header, begin, end, mask);
        for (size_t i = begin; !is_turn && i < end; i++)
            mask[i] = (o->origins[i] & JINJA_ASSISTANT) != 0;
    }
    buf_release(&header);
    return rc;
}

/* Adjacent bytes of one kind form one span. */
static void spans_make(const struct jinja_output *o, const uint8_t *mask, struct chat_text *out) {
    size_t cap = 0;
    for (size_t i = 0; i < o->n; i++) {
        bool data = o->origins[i] & JINJA_DATA;
        struct chat_span *last = out->n_spans ? &out->spans[out->n_spans - 1] : NULL;
        if (!last || last->user_data != data || last->assistant != mask[i]) {
            if (out->n_spans == cap) {
                cap = 2 * cap + 16;
                out->spans = xrealloc(out->spans, cap * sizeof *last);
            }
            last = &out->spans[out->n_spans++];
            *last = (struct chat_span){.begin = i, .user_data = data, .assistant = mask[i]};
        }
        last->end = i + 1;
    }
}

static int template_render(const struct chat_template *c, const struct chat_template_input *chat,
                           struct chat_text *out, struct error *err) {
    struct rendering r = {.c = c,
                          .chat = chat,
                          .max_steps = chat->template ? REQUEST_TEMPLATE_STEPS : JINJA_MAX_STEPS};
    struct jinja_output o;
    uint8_t *mask = NULL;
    int rc = render_messages(&r, json_array_size(chat->messages), chat->generation_prompt, &o, err);
    if (rc == OK && !(mask = try_calloc(o.n + 1, 1, err))) rc = err->code;
    if (rc == OK) rc = assistant_mask_compute(&r, &o, mask, err);
    if (rc == OK) {
        spans_make(&o, mask, out);
        out->text = o.text;
        out->len = o.n;
        o.text = NULL;
    }
    free(mask);
    jinja_output_release(&o);
    return rc;
}

static int tools_check(const struct chat_template_input *chat, struct error *err) {
    if (!json_array_size(chat->tools)) return OK;
    return error_set(err, ERR_MISMATCH, "the model has no chat template that knows tools");
}

int chat_template_render(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct chat_text *out, struct error *err) {
    *out = (struct chat_text){0};
    if (tokenizer_get_template(t))
        return template_render(tokenizer_get_template(t), chat, out, err);
    if (tools_check(chat, err) != OK) return err->code;
    struct chat_template c = {.now = -1,
                              .jinja = jinja_parse(chatml_template, strlen(chatml_template), err)};
    CHECK(c.jinja != NULL);
    int rc = template_render(&c, chat, out, err);
    jinja_free(c.jinja);
    return rc;
}

void chat_text_release(struct chat_text *c) {
    free(c->text);
    free(c->spans);
    *c = (struct chat_text){0};
}

static void pending_flush(struct chat_encoding *e) {
    if (e->pending.len) encode_text(e, e->pending.data, e->pending.len);
    e->pending.len = 0;
}

static void fragment_add(void *ctx, int32_t id, const char *p, size_t n) {
    struct chat_encoding *e = ctx;
    if (!tokenizer_is_special(e->t, id)) {
        buf_add(&e->pending, p, n);
        return;
    }
    pending_flush(e);
    add_special(e, id);
}

static void chat_text_encode(const struct tokenizer *t, const struct chat_text *c,
                             struct token_ids *out, struct buf *mask) {
    struct chat_encoding e = {.t = t, .out = out, .mask = mask};
    for (size_t i = 0; i < c->n_spans; i++) {
        const struct chat_span *s = &c->spans[i];
        if (s->assistant != e.is_assistant) pending_flush(&e);
        e.is_assistant = s->assistant;
        if (s->user_data)
            buf_add(&e.pending, c->text + s->begin, s->end - s->begin);
        else
            split_special_tokens(t, c->text + s->begin, s->end - s->begin, true, fragment_add, &e);
    }
    pending_flush(&e);
    buf_release(&e.pending);
}

/* Encodes as ChatML: messages with text content only. */
static int chatml_encode_json(const struct tokenizer *t, const struct chat_template_input *chat,
                              struct token_ids *out, struct buf *mask, struct error *err) {
    size_t n = json_array_size(chat->messages);
    if (tools_check(chat, err) != OK) return err->code;
    struct chat_message *msgs = xcalloc(n + 1, sizeof *msgs);
    int rc = OK;
    for (size_t i = 0; rc == OK && i < n; i++) {
        const json_t *m = json_array_get(chat->messages, i);
        msgs[i] = (struct chat_message){json_string_value(json_object_get(m, "role")),
                                        json_string_value(json_object_get(m, "content"))};
        if (!msgs[i].role || !msgs[i].content)
            rc = error_set(err, ERR_FORMAT, "message %zu needs a role and a content, both strings",
                           i + 1);
    }
    if (rc == OK) chatml_encode(t, msgs, (int)n, chat->generation_prompt, out, mask);
    free(msgs);
    return rc;
}

/* Encodes with the template that is part of the request. */
static int request_template_encode(const struct tokenizer *t,
                                   const struct chat_template_input *chat, struct token_ids *out,
                                   struct buf *mask, struct error *err) {
    struct chat_template *c = chat_template_new(t, chat->template);
    struct chat_text text = {0};
    int rc = template_render(c, chat, &text, err);
    if (rc == OK) chat_text_encode(t, &text, out, mask);
    chat_text_release(&text);
    chat_template_free(c);
    return rc;
}

int chat_template_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct token_ids *out, struct buf *mask, struct error *err) {
    struct chat_text text;
    if (chat->template) return request_template_encode(t, chat, out, mask, err);
    if (!tokenizer_get_template(t)) return chatml_encode_json(t, chat, out, mask, err);
    int rc = chat_template_render(t, chat, &text, err);
    if (rc == OK) chat_text_encode(t, &text, out, mask);
    chat_text_release(&text);
    return rc;
}

int chat_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                bool generation_prompt, struct token_ids *out, struct buf *mask,
                struct error *err) {
    if (!tokenizer_get_template(t)) {
        chatml_encode(t, msgs, n, generation_prompt, out, mask);
        return OK;
    }
    struct chat_template_input chat = {.messages = messages_json(msgs, n, err),
                                       .generation_prompt = generation_prompt};
    int rc = chat.messages ? chat_template_encode(t, &chat, out, mask, err) : err->code;
    json_decref((json_t *)(uintptr_t)chat.messages);
    return rc;
}
