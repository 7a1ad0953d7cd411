/*
 * chat: messages as ChatML tokens, with the mask of the assistant's own words.
 *
 * The turn's header, its content and its end are encoded one by one: that is what generation sees
 * (the prompt ends after the header), so training sees the same tokens, and a conversation's tokens
 * are a prefix of its continuation's. What a message says is never read as a special token. Other
 * templates are not rendered.
 *
 * Invariant: with a mask, every token added gets one byte, 1 exactly for the content and the end of
 * assistant turns.
 */
#include "model/tokenizer_internal.h"

#include <string.h>

struct chat {
    const struct tokenizer *t;
    int32_t begin, end; /* <|im_start|> and <|im_end|>, or -1: written as plain text */
    struct ids *out;
    struct buf *mask;
    bool within; /* the next text goes on from text: some tokenizers put a space before a text */
};

static int32_t special_find(const struct tokenizer *t, const char *piece) {
    int32_t id = tok_find(t, piece);
    return tok_is_special(t, id) ? id : -1;
}

static void chat_mask(struct chat *c, int from, bool own) {
    char byte = own ? 1 : 0;
    for (int i = from; c->mask && i < c->out->n; i++) buf_add(c->mask, &byte, 1);
}

static void chat_text(struct chat *c, const char *text, bool own) {
    int from = c->out->n;
    tok_encode(c->t, text, strlen(text), c->within ? TOK_CONTINUE : 0, c->out);
    c->within |= *text != 0;
    chat_mask(c, from, own);
}

static void chat_special(struct chat *c, int32_t id, const char *text, bool own) {
    if (id < 0) {
        chat_text(c, text, own);
        return;
    }
    ids_add(c->out, id);
    c->within = c->t->prefix_once;
    chat_mask(c, c->out->n - 1, own);
}

static void chat_header(struct chat *c, const char *role) {
    chat_special(c, c->begin, "<|im_start|>", false);
    struct buf b = {0};
    buf_printf(&b, "%s\n", role);
    chat_text(c, b.data, false);
    buf_release(&b);
}

static void chat_turn(struct chat *c, const struct message *m) {
    bool own = strcmp(m->role, "assistant") == 0;
    chat_header(c, m->role);
    chat_text(c, m->content, own);
    chat_special(c, c->end, "<|im_end|>", own);
    chat_text(c, "\n", false);
}

/* A model that begins its texts with a token gets it when the conversation begins `out`. */
void chat_encode(const struct tokenizer *t, const struct message *msgs, int n,
                 bool generation_prompt, struct ids *out, struct buf *mask) {
    struct chat c = {.t = t,
                     .out = out,
                     .mask = mask,
                     .begin = special_find(t, "<|im_start|>"),
                     .end = special_find(t, "<|im_end|>")};
    if (c.begin < 0 || c.end < 0) c.begin = c.end = -1;
    int from = out->n;
    if (from == 0 && tok_add_bos(t)) ids_add(out, tok_bos(t));
    chat_mask(&c, from, false);
    for (int i = 0; i < n; i++) chat_turn(&c, &msgs[i]);
    if (generation_prompt) chat_header(&c, "assistant");
}
