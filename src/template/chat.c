/*
 * chat: conversations as tokens, with a mask of the tokens that the assistant writes.
 *
 * A model with a chat template gets the template's output. A model without one, or with the
 * template that our own writers put into files, gets ChatML. In both cases the content of a message
 * is never read as a special token, and a conversation's tokens are a prefix of its continuation's
 * tokens if its text is a prefix: the text is cut where the assistant's part begins and ends, as in
 * generation.
 *
 * In ChatML the turn's header, its content and its end are encoded one by one. In a template's
 * output the special tokens of the template's own text are cut out and the text between two of them
 * is encoded in one piece.
 *
 * Invariant: with a mask, every token added gets one byte, 1 exactly for the assistant's part: in
 * ChatML the content and the end of its turns, in a template the turns without the header.
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
    struct buf pending; /* text of a template since its last special token */
    bool within; /* the next text continues a text: some tokenizers add a space before a text */
    bool own;
};

static void mask_from(struct chat_encoding *e, int from) {
    char byte = e->own ? 1 : 0;
    for (int i = from; e->mask && i < e->out->n; i++) buf_add(e->mask, &byte, 1);
}

static void put_text(struct chat_encoding *e, const char *text, size_t len) {
    int from = e->out->n;
    tokenizer_encode(e->t, text, len, e->within ? TOKENIZER_NO_PREFIX_SPACE : 0, e->out);
    e->within |= len > 0;
    mask_from(e, from);
}

static void put_special(struct chat_encoding *e, int32_t id) {
    token_ids_add(e->out, id);
    e->within = tokenizer_adds_space_once(e->t);
    mask_from(e, e->out->n - 1);
}

/* ChatML */

static int32_t special_find(const struct tokenizer *t, const char *piece) {
    int32_t id = tokenizer_piece_to_id(t, piece);
    return tokenizer_is_special(t, id) ? id : -1;
}

/* Writes a mark as plain text if the tokenizer lacks it. */
static void put_mark(struct chat_encoding *e, int32_t id, const char *text) {
    if (id < 0)
        put_text(e, text, strlen(text));
    else
        put_special(e, id);
}

static void put_header(struct chat_encoding *e, int32_t begin, const char *role) {
    put_mark(e, begin, "<|im_start|>");
    struct buf b = {0};
    buf_printf(&b, "%s\n", role);
    put_text(e, b.data, b.len);
    buf_release(&b);
}

/* Adds BOS, if the model uses one, when `out` is empty. */
static void chat_ml_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                           bool generation_prompt, struct token_ids *out, struct buf *mask) {
    struct chat_encoding e = {.t = t, .out = out, .mask = mask};
    int32_t begin = special_find(t, "<|im_start|>"), end = special_find(t, "<|im_end|>");
    if (begin < 0 || end < 0) begin = end = -1;
    if (out->n == 0 && tokenizer_add_bos(t)) {
        token_ids_add(out, tokenizer_bos(t));
        mask_from(&e, 0);
    }
    for (int i = 0; i < n; i++) {
        put_header(&e, begin, msgs[i].role);
        e.own = strcmp(msgs[i].role, "assistant") == 0;
        put_text(&e, msgs[i].content, strlen(msgs[i].content));
        put_mark(&e, end, "<|im_end|>");
        e.own = false;
        put_text(&e, "\n", 1);
    }
    if (generation_prompt) put_header(&e, begin, "assistant");
}

/* templates */

struct chat_template {
    struct jinja *jinja; /* NULL: `problem` has the reason */
    struct error problem;
    json_t *tokens; /* bos_token … as transformers passes them */
    int64_t now;    /* SOURCE_DATE_EPOCH, or -1: by default a prompt does not depend on the clock */
    int32_t end;    /* the special token that closes the assistant's turn, or -1 */
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

static int32_t turn_end(const struct tokenizer *t) {
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
    c->jinja = jinja_parse(text, strlen(text), &c->problem);
    c->tokens = json_object();
    c->now = source_date();
    token_set(c->tokens, t, "bos_token", tokenizer_bos(t));
    token_set(c->tokens, t, "eos_token", tokenizer_eos(t));
    token_set(c->tokens, t, "unk_token", tokenizer_get_spec(t)->unk);
    c->end = -1;
    return c;
}

static void chat_template_free(struct chat_template *c) {
    if (!c) return;
    jinja_free(c->jinja);
    json_decref(c->tokens);
    free(c);
}

void tokenizer_set_chat_template(struct tokenizer *t, const char *text) {
    bool own = text && strcmp(text, chatml_template) != 0;
    struct chat_template *c = own ? chat_template_new(t, text) : NULL;
    tokenizer_attach_template(t, c, chat_template_free);
    if (c && c->jinja) c->end = turn_end(t);
}

int32_t tokenizer_eot(const struct tokenizer *t) {
    const struct chat_template *c = tokenizer_get_template(t);
    if (c && c->end >= 0) return c->end;
    int32_t end = tokenizer_piece_to_id(t, "<|im_end|>");
    return end >= 0 ? end : tokenizer_eos(t);
}

/* One conversation under one template. It is rendered up to five times, with one budget for all. */
struct rendering {
    const struct chat_template *c;
    const struct chat_template_input *chat;
    uint64_t steps, max_steps; /* used so far, and the limit */
};
/* Budget for a template that a conversation brings along: about 0.1 s. Published templates take 300
 * steps per message. */
enum { FOREIGN_STEPS = 5000000 };

/* Renders the first n messages. */
static int render(struct rendering *r, size_t n, bool prompt, struct jinja_output *out,
                  struct error *err) {
    const struct chat_template *c = r->c;
    const struct chat_template_input *chat = r->chat;
    if (!c->jinja) {
        *err = c->problem;
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
                             .spent = r->steps,
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

/* The text that a generation prompt adds to the first n messages: appended, or else in place of the
 * end of the template's output. */
static int header_of(struct rendering *r, size_t n, struct buf *header, struct error *err) {
    struct jinja_output with, without = {0};
    int rc = render(r, n, true, &with, err);
    if (rc == OK) rc = render(r, n, false, &without, err);
    if (rc == OK) {
        size_t from = with.n;
        bool goes_on = with.n >= without.n && memcmp(with.text, without.text, without.n) == 0;
        if (goes_on)
            from = without.n;
        else if (with.n_runs && with.runs[with.n_runs - 1].message < 0)
            from = with.runs[with.n_runs - 1].begin;
        buf_add(header, with.text + from, with.n - from); /* makes header->data for "" too */
    }
    jinja_output_release(&with);
    jinja_output_release(&without);
    return rc;
}

/* The header of a generation. It follows the messages before the assistant's first turn, or the
 * whole conversation when that cut cannot be rendered. It stays empty if both renderings fail.
 * Fails only if the rendering was stopped or has no steps left. */
static int header_find(struct rendering *r, struct buf *header, struct error *err) {
    size_t n = json_array_size(r->chat->messages), first = 0;
    while (first < n && !is_assistant(r->chat, (int)first)) first++;
    int rc = first > 0 ? header_of(r, first, header, err) : ERR_FORMAT;
    if (rc != OK && rc != ERR_STATE) rc = header_of(r, n, header, err);
    return rc == ERR_STATE || (rc != OK && r->steps >= r->max_steps) ? rc : OK;
}

/* Marks a turn except for its header and the white space after its end. */
static void turn_mark(const struct jinja_output *o, const struct buf *header, size_t begin,
                      size_t end, uint8_t *own) {
    size_t data = begin, same = 0;
    while (data < end && !o->origins[data]) data++;
    const char *found =
        header->len ? memmem(o->text + begin, data - begin, header->data, header->len) : NULL;
    if (found) begin = (size_t)(found - o->text);
    while (begin + same < data && same < header->len && o->text[begin + same] == header->data[same])
        same++;
    while (end > begin + same && !o->origins[end - 1] && strchr(" \t\r\n", o->text[end - 1])) end--;
    memset(own + begin + same, 1, end - begin - same);
}

static int own_mark(struct rendering *r, const struct jinja_output *o, uint8_t *own,
                    struct error *err) {
    bool generated = false, sought = false;
    int rc = OK;
    struct buf header = {0};
    for (size_t i = 0; i < o->n; i++) {
        own[i] = (o->origins[i] & JINJA_GENERATED) != 0;
        generated |= own[i];
    }
    for (size_t k = 0; rc == OK && !generated && k < o->n_runs; k++) {
        size_t begin = o->runs[k].begin, end = k + 1 < o->n_runs ? o->runs[k + 1].begin : o->n;
        bool turn = is_assistant(r->chat, o->runs[k].message);
        if (turn && !sought) rc = header_find(r, &header, err);
        sought |= turn;
        if (turn) turn_mark(o, &header, begin, end, own);
        for (size_t i = begin; !turn && i < end; i++)
            own[i] = (o->origins[i] & JINJA_ASSISTANT) != 0;
    }
    buf_release(&header);
    return rc;
}

/* Adjacent bytes of one kind form one span. */
static void spans_make(const struct jinja_output *o, const uint8_t *own, struct chat_text *out) {
    size_t cap = 0;
    for (size_t i = 0; i < o->n; i++) {
        bool data = o->origins[i] & JINJA_DATA;
        struct chat_span *last = out->n_spans ? &out->spans[out->n_spans - 1] : NULL;
        if (!last || last->data != data || last->own != own[i]) {
            if (out->n_spans == cap) {
                cap = 2 * cap + 16;
                out->spans = xrealloc(out->spans, cap * sizeof *last);
            }
            last = &out->spans[out->n_spans++];
            *last = (struct chat_span){.begin = i, .data = data, .own = own[i]};
        }
        last->end = i + 1;
    }
}

static int template_render(const struct chat_template *c, const struct chat_template_input *chat,
                           struct chat_text *out, struct error *err) {
    struct rendering r = {
        .c = c, .chat = chat, .max_steps = chat->template ? FOREIGN_STEPS : JINJA_MAX_STEPS};
    struct jinja_output o;
    uint8_t *own = NULL;
    int rc = render(&r, json_array_size(chat->messages), chat->generation_prompt, &o, err);
    if (rc == OK && !(own = try_calloc(o.n + 1, 1, err))) rc = err->code;
    if (rc == OK) rc = own_mark(&r, &o, own, err);
    if (rc == OK) {
        spans_make(&o, own, out);
        out->text = o.text;
        out->len = o.n;
        o.text = NULL;
    }
    free(own);
    jinja_output_release(&o);
    return rc;
}

static int tools_refuse(const struct chat_template_input *chat, struct error *err) {
    if (!json_array_size(chat->tools)) return OK;
    return error_set(err, ERR_MISMATCH, "the model has no chat template that knows tools");
}

int chat_template_render(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct chat_text *out, struct error *err) {
    *out = (struct chat_text){0};
    if (tokenizer_get_template(t)) return template_render(tokenizer_get_template(t), chat, out, err);
    if (tools_refuse(chat, err) != OK) return err->code;
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
    if (e->pending.len) put_text(e, e->pending.data, e->pending.len);
    e->pending.len = 0;
}

static void fragment_put(void *ctx, int32_t id, const char *p, size_t n) {
    struct chat_encoding *e = ctx;
    if (!tokenizer_is_special(e->t, id)) {
        buf_add(&e->pending, p, n);
        return;
    }
    pending_flush(e);
    put_special(e, id);
}

static void text_encode(const struct tokenizer *t, const struct chat_text *c, struct token_ids *out,
                        struct buf *mask) {
    struct chat_encoding e = {.t = t, .out = out, .mask = mask};
    for (size_t i = 0; i < c->n_spans; i++) {
        const struct chat_span *s = &c->spans[i];
        if (s->own != e.own) pending_flush(&e);
        e.own = s->own;
        if (s->data)
            buf_add(&e.pending, c->text + s->begin, s->end - s->begin);
        else
            split_special_tokens(t, c->text + s->begin, s->end - s->begin, true, fragment_put, &e);
    }
    pending_flush(&e);
    buf_release(&e.pending);
}

/* Without a template: messages with text content only. */
static int plain_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                        struct token_ids *out, struct buf *mask, struct error *err) {
    size_t n = json_array_size(chat->messages);
    if (tools_refuse(chat, err) != OK) return err->code;
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
    if (rc == OK) chat_ml_encode(t, msgs, (int)n, chat->generation_prompt, out, mask);
    free(msgs);
    return rc;
}

/* With a template that the conversation brings along. */
static int foreign_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                          struct token_ids *out, struct buf *mask, struct error *err) {
    struct chat_template *c = chat_template_new(t, chat->template);
    struct chat_text text = {0};
    int rc = template_render(c, chat, &text, err);
    if (rc == OK) text_encode(t, &text, out, mask);
    chat_text_release(&text);
    chat_template_free(c);
    return rc;
}

int chat_template_encode(const struct tokenizer *t, const struct chat_template_input *chat,
                         struct token_ids *out, struct buf *mask, struct error *err) {
    struct chat_text text;
    if (chat->template) return foreign_encode(t, chat, out, mask, err);
    if (!tokenizer_get_template(t)) return plain_encode(t, chat, out, mask, err);
    int rc = chat_template_render(t, chat, &text, err);
    if (rc == OK) text_encode(t, &text, out, mask);
    chat_text_release(&text);
    return rc;
}

int chat_encode(const struct tokenizer *t, const struct chat_message *msgs, int n,
                bool generation_prompt, struct token_ids *out, struct buf *mask,
                struct error *err) {
    if (!tokenizer_get_template(t)) {
        chat_ml_encode(t, msgs, n, generation_prompt, out, mask);
        return OK;
    }
    struct chat_template_input chat = {.messages = messages_json(msgs, n, err),
                                       .generation_prompt = generation_prompt};
    int rc = chat.messages ? chat_template_encode(t, &chat, out, mask, err) : err->code;
    json_decref((json_t *)(uintptr_t)chat.messages);
    return rc;
}
